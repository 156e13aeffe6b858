"""Memory of each rank of ``--tp``, with a Llama of a billion parameters: ``python benchmarks/tensor_parallel.py``.

On the CPU with gloo. The folder of the weights (2 GB in bfloat16) is made below TMPDIR and removed at the end.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

from common import Measurement, finish, options

RANKS = (1, 2)
SIZES = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32}
ABOUT = """
`normscope capture MODEL --tp N --dtype float32` of a Llama of random weights, in files of 500 MB, over two lines.
Memory: the process's own pages (RssAnon) beyond those before the weights are read, at their peak, on the fullest rank;
pages of the mapped files are the system's to drop. Share: of the weights in float32.
"""


def main() -> None:
    args = options(__doc__).parse_args()
    measurements = []
    with tempfile.TemporaryDirectory() as folder:
        weights = 4 * save(Path(folder))
        measurements.append(Measurement("weights", "", "memory", "GB", [weights / 1e9]))
        for ranks in RANKS:
            launcher = ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
            subprocess.run([sys.executable, "-m", *launcher, __file__, "rank"], cwd=folder, check=True)
            peaks = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(ranks)]
            name = f"{ranks} rank{'s' * (ranks > 1)}"
            measurements.append(Measurement(name, "", "memory", "GB", [max(peaks) / 1e9]))
            measurements.append(Measurement(name, "", "share", "1", [max(peaks) / weights]))
    finish("tensor-parallel", ABOUT, measurements, args, threads=[1], libraries=["transformers", "safetensors"])


def save(folder: Path) -> int:
    """Save the network and a tokenizer of three words; return the number of its parameters."""
    import torch
    import transformers

    sys.path.append(str(Path(__file__).parents[1] / "tests"))
    from networks import save_llama

    save_llama(folder)
    (folder / "model.safetensors").unlink()
    config = transformers.LlamaConfig(vocab_size=32000, num_key_value_heads=8, dtype="bfloat16", **SIZES)
    with torch.device("meta"):
        network = transformers.LlamaForCausalLM._from_config(config, dtype=torch.bfloat16)
    network.to_empty(device="cpu")
    for name, tensor in [*network.named_parameters(), *network.named_buffers()]:
        tensor.data.normal_(0, 0.02) if tensor.ndim > 1 else tensor.data.fill_(1.0 if "norm" in name else 0.01)
    network.save_pretrained(folder, max_shard_size="500MB")
    return sum(tensor.numel() for tensor in network.parameters())


def run_rank() -> None:
    """Capture on this rank, and write the peak of its memory beyond that of the imports."""
    import transformers  # noqa: F401
    from transformers import LlamaForCausalLM  # noqa: F401

    import normscope.pairs.capture  # noqa: F401
    from normscope.cli import app

    before, peak, done = own_bytes(), 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.005):
            peak = max(peak, own_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    more = f"--tp {os.environ['WORLD_SIZE']} --dtype float32 --device cpu --data lines.txt --force"
    try:
        app(f"capture transformers:. -o seen.safetensors {more}".split(), standalone_mode=False)
    except SystemExit as end:
        if end.code:
            raise
    finally:
        done.set()
        watcher.join()
    Path(f"{os.environ['RANK']}.json").write_text(json.dumps(peak - before))


def own_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition("RssAnon:")[2].split()[0])


if __name__ == "__main__":
    run_rank() if "rank" in sys.argv else main()
