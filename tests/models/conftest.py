"""A model hub on this machine that speaks huggingface_hub's protocol, and weights to put on it."""

import hashlib
import json
import os
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import timm
import torch
from loads import options_with
from safetensors.torch import save_file


@pytest.fixture
def options():
    return options_with


@pytest.fixture(scope="session")
def tiny_vit():
    """Return the architecture test_vit with weights that no seed of the tests makes."""
    torch.manual_seed(1234)
    return timm.create_model("test_vit").eval()


@pytest.fixture(scope="session")
def tiny_vit_file(tiny_vit, tmp_path_factory):
    path = tmp_path_factory.mktemp("weights") / "model.safetensors"
    save_file(tiny_vit.state_dict(), path)
    return path


@dataclass
class Hub:
    """What the local hub serves, how it answers, and what it was asked."""

    files: dict[str, bytes]
    status: int = 200
    commit: str | None = "0123456789abcdef0123456789abcdef01234567"
    delay: float = 0.0  # seconds before the first answer
    requests: list[str] = field(default_factory=list)


def _handler(hub):
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self):
            hub.requests.append(f"{self.command} {self.path}")
            time.sleep(hub.delay)
            hub.delay = 0.0
            repo, _, rest = self.path.lstrip("/").partition("/resolve/")
            body = hub.files.get(f"{repo}/{rest.partition('/')[2]}")
            status = hub.status if hub.status != 200 or body is not None else 404
            self.send_response(status)
            if hub.commit:
                self.send_header("X-Repo-Commit", hub.commit)
            if status == 404:
                known = any(name.startswith(f"{repo}/") for name in hub.files)
                self.send_header("X-Error-Code", "EntryNotFound" if known else "RepoNotFound")
            if status == 200:
                self.send_header("ETag", f'"{hashlib.sha256(body).hexdigest()}"')
            content = body if status == 200 else b""
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content)

        def do_HEAD(self):
            self.do_GET()

        def log_message(self, *args):
            pass

    return Handler


@pytest.fixture
def hub(tiny_vit_file):
    """Serve test_vit's weights; ``hub.url`` is what HF_ENDPOINT takes."""
    served = Hub({"timm/test_vit.r160_in1k/model.safetensors": tiny_vit_file.read_bytes()})
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(served))
    threading.Thread(target=server.serve_forever, args=[0.05], daemon=True).start()
    served.url = f"http://127.0.0.1:{server.server_port}"
    served.stop = lambda: (server.shutdown(), server.server_close())
    yield served
    served.stop()


@dataclass
class Outcome:
    """What a Python process of its own printed as JSON, or how it ended."""

    result: dict | None
    stderr: str
    seconds: float


@pytest.fixture
def python(tmp_path):
    """Run code in a process of its own: huggingface_hub reads its environment when it is imported."""

    def run(code, **environment):
        clean = {key: value for key, value in os.environ.items() if not key.upper().startswith(("HF_", "HTTP"))}
        clean |= {"HF_HOME": str(tmp_path / "hf"), "NO_PROXY": "127.0.0.1", "OMP_NUM_THREADS": "1"}
        start = time.monotonic()
        process = subprocess.run(
            [sys.executable, "-c", code], env=clean | environment, capture_output=True, text=True, timeout=120
        )
        seconds = time.monotonic() - start
        last_line = process.stdout.strip().rpartition("\n")[2]
        return Outcome(json.loads(last_line) if last_line else None, process.stderr, seconds)

    return run


LOAD_EACH = """
import json, torch
from normscope.errors import NormscopeError
from normscope.loading import load
results = []
for arguments in json.loads({!r}):
    try:
        model = load(device="cpu", **arguments)
        batch = next(iter(model.inputs))
        with torch.no_grad():
            outputs = model.outputs.read(model.module(*batch.args, **batch.kwargs), batch)
        size = sum(parameter.numel() for parameter in model.module.parameters())
        ids = batch.kwargs["input_ids"][0].tolist() if "input_ids" in batch.kwargs else None
        results.append({{"about": model.about, "outputs": outputs.flatten()[:500].tolist(), "ids": ids, "size": size}})
    except NormscopeError as error:
        results.append({{"exit_status": error.exit_status, "sentence": str(error)}})
print(json.dumps(results))
"""


@pytest.fixture
def load_each(python):
    """Load several models in one process, as importing the libraries takes longer than the rest."""

    def run(*arguments, **environment):
        outcome = python(LOAD_EACH.format(json.dumps(arguments)), **environment)
        assert outcome.result is not None, outcome.stderr
        return outcome.result, outcome

    return run


@pytest.fixture
def pictures(tmp_path):
    """Make a folder: three images in two folders, one damaged image, and two files that are none."""
    from PIL import Image

    folder = tmp_path / "pictures"
    (folder / "b").mkdir(parents=True)
    generator = torch.Generator().manual_seed(0)
    for name in ("a.png", "b/c.JPG", "b/d.png"):
        pixels = torch.randint(0, 256, (48, 64, 3), dtype=torch.uint8, generator=generator)
        Image.fromarray(pixels.numpy()).save(folder / name)
    (folder / "b" / "broken.png").write_bytes((folder / "a.png").read_bytes()[:500])
    (folder / "notes.txt").write_text("no image")
    (folder / "b" / "table.csv").write_text("no,image")
    return folder


@pytest.fixture(scope="session")
def tokenizer():
    """Make a tokenizer whose tokens are bytes, with an end-of-sequence token behind each text."""
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate(["<pad>", "</s>", *alphabet])}
    core = Tokenizer(models.BPE(vocabulary, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return transformers.PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="</s>")  # noqa: S106


@pytest.fixture(scope="session")
def t5():
    """Make a tokenizer of letters, and the configuration of a tiny T5 that takes its tokens."""
    import transformers

    letters = [(piece, 0.0) for piece in ("<pad>", "</s>", "<unk>")]
    letters += [(letter, -2.0) for letter in "▁abcdefghijklmnopqrstuvwxyz,"]
    sizes = {"vocab_size": len(letters), "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    return transformers.T5Tokenizer(vocab=letters, extra_ids=0), transformers.T5Config(**sizes)
