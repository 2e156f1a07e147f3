#!/usr/bin/env bash
# Build the wheel and the source distribution, check both, and try each where nothing else is installed.
# Called by `make distributions`, which puts the tools that it needs first into PATH.
set -euo pipefail
cd "$(dirname "$0")/.."

rm -rf dist
python -m build --outdir dist . >/dev/null
twine check --strict dist/*
check-wheel-contents dist/*.whl
cffconvert --validate

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

echo "== the wheel, in a new environment with [report]"
python -m venv "$folder/venv"
wheel=$(echo "$PWD"/dist/*.whl)
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check "$wheel[report]"
(
  cd "$folder"
  PATH="$folder/venv/bin:$PATH"
  wqk --version
  wqk demo
  encoder=$(python -c 'import wqk; print(wqk.demo_model("encoder"))')
  wqk scan "$encoder" --out scores.parquet --report report.html
  cp -r "$encoder" copy
  wqk same "$encoder" copy --all
)

echo "== tests of the source distribution, from its own files"
mkdir "$folder/source"
tar -xzf dist/*.tar.gz -C "$folder/source" --strip-components 1
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check \
  "pytest>=8.3" "hypothesis>=6.120" "jaxtyping>=0.2.36" "beartype>=0.19"
(
  cd "$folder/source"
  "$folder/venv/bin/python" -m pytest --quiet -p no:cacheprovider -m "not campaign and not slow" \
    tests/forms tests/tables tests/test_errors.py
)
