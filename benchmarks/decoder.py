"""Small pre-norm decoders, trained on docstrings: ``python benchmarks/decoder.py``."""

from __future__ import annotations

import argparse
import ast
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from pretrained import JUDGED, docstrings
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

VOCABULARY, USED = 8192, 1024  # entries; all beyond those used never occur in any text
POSITIONS, WINDOW, TEXTS_A_STEP = 320, 128, 16
START, PAD = "<|start|>", "<|pad|>"
RATE = 2e-3
# Seed, steps, and configuration. Nothing was tuned on the second.
NETWORKS = {
    "gpt2-128": (0, 900, {"n_embd": 128, "n_layer": 4, "n_head": 4, "tie_word_embeddings": True}),
    "llama-128": (2, 900, {"hidden_size": 128, "intermediate_size": 344, "num_hidden_layers": 4}),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("decoders"), help="to save networks in (%(default)s)")
    parser.add_argument("--name", choices=list(NETWORKS), nargs="+", default=list(NETWORKS), help="(all)")
    parser.add_argument("--steps", type=int, help="of the training, in place of the network's own")
    args = parser.parse_args()
    torch.set_num_threads(1)
    texts = list(training_texts())
    tokenizer = trained_tokenizer(texts)
    for name in args.name:
        began = time.process_time()
        seed, steps, _ = NETWORKS[name]
        network, loss = trained(name, seed, tokenizer, texts, args.steps or steps)
        network.save_pretrained(args.folder / name)
        tokenizer.save_pretrained(args.folder / name)
        print(f"{name}: loss {loss:.3f} after {time.process_time() - began:.0f} CPU s", flush=True)


def training_texts() -> Iterator[str]:
    """Yield the docstrings of Python's standard library, but for those of the modules that networks are judged by."""
    root = Path(sysconfig.get_paths()["stdlib"])
    judged = set(docstrings(JUDGED))
    for path in sorted(root.rglob("*.py")):
        if {"site-packages", "test", "tests"} & set(path.parts):
            continue
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module):
                text = " ".join((ast.get_docstring(node) or "").split())[:800]
                if text and text not in judged:
                    yield text


def trained_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Learn byte pairs, of which there are far fewer than the networks have entries for."""
    pairs = Tokenizer(models.BPE())
    pairs.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    pairs.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    pairs.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=USED, special_tokens=[START, PAD], initial_alphabet=alphabet)
    )
    pairs.post_processor = processors.TemplateProcessing(single=f"{START} $A", special_tokens=[(START, 0)])
    return PreTrainedTokenizerFast(
        tokenizer_object=pairs, bos_token=START, eos_token=START, pad_token=PAD, model_max_length=POSITIONS
    )


def untrained(name: str) -> PreTrainedModel:
    options = dict(NETWORKS[name][2], vocab_size=VOCABULARY, bos_token_id=0, eos_token_id=0, pad_token_id=1)
    if name.startswith("gpt2"):
        dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        return GPT2LMHeadModel(GPT2Config(**options, **dropout, n_positions=POSITIONS))
    options |= {"num_attention_heads": 4, "max_position_embeddings": POSITIONS, "tie_word_embeddings": False}
    return LlamaForCausalLM(LlamaConfig(**options))


def trained(
    name: str, seed: int, tokenizer: PreTrainedTokenizerFast, texts: list[str], steps: int
) -> tuple[torch.nn.Module, float]:
    """Train a network to predict each next token; also its mean loss over the last hundred steps."""
    torch.manual_seed(seed)
    network = untrained(name).train()
    stream = torch.tensor([token for text in texts for token in tokenizer(text)["input_ids"]])
    optimizer = torch.optim.AdamW(network.parameters(), lr=RATE, weight_decay=0.01, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=steps, pct_start=0.05)
    losses: list[float] = []
    for step in range(steps):
        first = torch.randint(len(stream) - WINDOW, (TEXTS_A_STEP,))
        ids = torch.stack([stream[start : start + WINDOW] for start in first.tolist()])
        optimizer.zero_grad()
        loss = network(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(float(loss.detach()))
        if step % 50 == 0:
            print(f"{name}, step {step}: {sum(losses[-50:]) / len(losses[-50:]):.3f}", flush=True)
    return network.eval(), sum(losses[-100:]) / len(losses[-100:])


if __name__ == "__main__":
    main()
