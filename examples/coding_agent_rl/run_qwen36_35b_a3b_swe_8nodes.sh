#!/bin/sh
# Run `ratchet launch` by the name of vime's launcher, from any directory (docs/vime.md).
cd "$(dirname "$0")/../.." && exec .venv/bin/ratchet launch "$@"
