#!/usr/bin/env bash
# Make constraints.txt, the versions that README's commands install: `scripts/make_constraints.sh`. It takes uv, half a
# minute, and the newest version of each package beside torch 2.11 and torchaudio 2.11, which the extra `speech` asks for.
# .ci/run then shows whether they pass together.
set -euo pipefail
cd "$(dirname "$0")/.."

compile() {
  uv pip compile --quiet --no-header --no-annotate --no-emit-index-url --no-emit-find-links \
    --extra test --extra speech --extra docs --extra pretrained pyproject.toml "$@"
}
resolved=$(compile --universal --python-version 3.11)
cat > constraints.txt <<END
# Versions that pass the tests together on Python 3.11 to 3.14; scripts/make_constraints.sh makes this file.
# pip install -c constraints.txt '.[speech]'
$resolved
END
for python in 3.11 3.12 3.13 3.14; do  # every version has a wheel for it
  compile --python-version "$python" --only-binary :all: --constraint constraints.txt > /dev/null
done
