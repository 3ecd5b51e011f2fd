#!/usr/bin/env bash
# Build the wheel, install it into an empty environment and use it as a new user would, outside the checkout.
# Leaves dist/*.whl. `scripts/release.sh python3.12` picks the interpreter; `make release` calls this.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
checkout=$PWD
python=${1:-python3}

version=$(sed -n 's/^__version__ = "\(.*\)"$/\1/p' graft/version.py)
if [ -z "$version" ] || ! grep -q "^## $version\b" CHANGELOG.md; then
	echo "release: CHANGELOG.md has no section '## ${version:-VERSION}'; write one, or change __version__ in graft/version.py" >&2
	exit 1
fi

place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
"$python" -m venv "$place/venv"
pip() { "$place/venv/bin/python" -m pip --quiet --disable-pip-version-check "$@"; }

rm -rf dist
pip wheel --no-deps --wheel-dir dist .
echo "release: $(ls dist)"

# torch first and at its exact version: a looser request can bring gigabytes of CUDA packages
pip install "$(grep '^torch==' constraints.txt)"
pip install --constraint constraints.txt dist/*.whl

# Nothing of the checkout can be imported from here, and neither the user's Python settings nor their graft folder count.
mkdir "$place/work"
cd "$place/work"
graft() {
	echo "release: graft $*"
	env -u PYTHONPATH HOME="$place" "$place/venv/bin/graft" "$@"
}
test "$(graft --version | tail -n 1)" = "graft $version"
small=(sft.steps=3 train.steps=2 rollout.tasks=4 rollout.samples=4 run.eval_tasks=8)
graft doctor
graft plan quickstart "${small[@]}"
graft train quickstart "${small[@]}"
graft runs
graft rollout quickstart --task '12+34*56='
graft eval quickstart --tasks 8
graft explain reward
graft export quickstart --out exported
env -u PYTHONPATH HOME="$place" "$place/venv/bin/python" -c '
import sys
import graft

assert not graft.__file__.startswith(sys.argv[1] + "/"), f"imported from the checkout: {graft.__file__}"
policy = graft.load("runs/quickstart")
print("release:", graft.generate(policy, "2+3=", max_tokens=4))
' "$checkout"
# a project of one's own, as the README begins
graft init my-agent
cd my-agent
graft train recipe.yaml sft.steps=3 train.steps=2 run.eval_tasks=8
echo "release: $version works outside the checkout; publish dist/"
