#!/usr/bin/env bash
# Runs the parts of one card, without a network, from the pieces of `make bundle`; a line per stage and step.
#   one_gpu.sh keep       copies the pieces beside this script to PLACE, for a machine to which they come one at a time
#   one_gpu.sh [STAGE…]   runs these stages, or all that TOTAL seconds allow, in their order
# Variables: PLACE=/tmp/one_gpu, OUT=PLACE/results (log.txt, summary.txt, card.csv, run.tar.gz), DEVICE=gpu (or cpu, at toy
# size), TOTAL=570, SLOW=1 (factor of each limit), ARGUMENTS (further ones of `ratchet train`). Needs Python with torch and venv, bash and coreutils.
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd)
export PLACE=${PLACE:-/tmp/one_gpu} DEVICE=${DEVICE:-gpu} PYTHON=${PYTHON:-python3}
export OUT=${OUT:-$PLACE/results} STARTED=${STARTED:-$(date +%s)}
export RATCHET_HOME=$PLACE/home XDG_CACHE_HOME=$PLACE/cache HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 PYTHONUNBUFFERED=1
export PIP_NO_INDEX=1 PIP_FIND_LINKS=$PLACE/wheels UV_NO_INDEX=1 UV_FIND_LINKS=$PLACE/wheels UV_OFFLINE=1
unset PYTHONDONTWRITEBYTECODE
repository=$PLACE/repository run_python=$PLACE/repository/.venv/bin/python model=$PLACE/model
[ "$DEVICE" = cpu ] && export CUDA_VISIBLE_DEVICES=
toy=$([ "$DEVICE" = cpu ] && echo --cpu-toy)
mkdir -p "$PLACE/pieces" "$OUT"

say() { printf '[%4d s] %s\n' $(($(date +%s) - STARTED)) "$*" | tee -a "$OUT/summary.txt"; }
ratchet() { "$run_python" -m cli.main "$@"; }
sql() { ratchet sql --csv "$1" | tr -d '\r'; }

keep() { cp "$here"/piece-* "$here/SHA256SUMS" "$PLACE/pieces"; }

unpack() {
    [ -e "$PLACE/pieces/SHA256SUMS" ] || keep
    (cd "$PLACE/pieces" && sha256sum --quiet -c SHA256SUMS) || return
    cat "$PLACE"/pieces/piece-* | "$PYTHON" -c '
import sys, tarfile
tarfile.open(fileobj=sys.stdin.buffer, mode="r|xz").extractall(sys.argv[1], filter="fully_trusted")' "$PLACE"
}

# Packages of the archive go before those of the machine.
environment() {
    [ "$DEVICE" = cpu ] || nvidia-smi || return
    "$PYTHON" -m venv --without-pip "$repository/.venv" || return
    "$PYTHON" -c 'import pathlib, torch; print(pathlib.Path(torch.__file__).parents[1])' >"$PLACE/machine" || return
    printf '%s\n' "$PLACE/site" "$repository" "$(cat "$PLACE/machine")" \
        >"$(echo "$repository"/.venv/lib/python3*/site-packages)/one_gpu.pth"
    printf '#!%s\nfrom ray.scripts.scripts import main\nmain()\n' "$run_python" >"$repository/.venv/bin/ray"
    chmod +x "$repository/.venv/bin/ray"
    "$run_python" -m compileall -q -j 0 "$PLACE/site" "$repository" >/dev/null
    if ! command -v bwrap >/dev/null; then
        mv "$PLACE/bin/bwrap" "$PLACE/bin/bwrap.program"
        printf '#!/bin/sh\nLD_LIBRARY_PATH=%s exec %s/bwrap.program "$@"\n' "$PLACE/bin" "$PLACE/bin" >"$PLACE/bin/bwrap"
        chmod +x "$PLACE/bin/bwrap"
    fi
    "$run_python" -c 'import torch, vllm, transformers; print(torch.__version__, vllm.__version__, transformers.__version__)' &&
        ratchet admin setup && ratchet doctor
}

model() {
    if [ "$DEVICE" = cpu ]; then ratchet models tiny-policy --out "$model"; return; fi
    [ -d "$model" ] || ratchet models get smollm2-135m --out "$model" || return
    cp "$repository/examples/pretrained/chat_template.jinja" "$model"
}

# The load check compares logprobs and gradients on the device; then one step.
load() {
    ratchet models check "$model" && "$run_python" -m tests.benchmarks.gpu --only model --model "$model" $toy
}

arguments() {
    printf '%s\n' --set "model=$model" ${ARGUMENTS:-}
    [ "$DEVICE" = gpu ] || printf '%s\n' --set 'engines=[{args: [--enforce-eager]}]' --set training.gpus=null \
        --set training.dtype=float32 --set engine.dtype=float32 --set engine.kv_cache_gib=1 --set engine.num_threads=1 \
        --set engine.max_num_seqs=16 --set sampling.max_context_tokens=512 \
        --set sampling.max_response_tokens=56 --set sampling.min_response_tokens=8 --set harness.max_turns=4 \
        --set sandbox.max_boxes=8 --set training.groups_per_step=2 --set training.group_size=4 --set training.steps=2 \
        --set training.bin_tokens=4096 --set 'evaluation.at=[]'
}

# The run goes on in its stack when the time of this stage is over; `results` ends both.
loop() {
    local more; mapfile -t more < <(arguments)
    ratchet train configs/one_gpu.yaml --check "${more[@]}" || return
    if [ "$DEVICE" != cpu ]; then
        setsid nvidia-smi --query-gpu=timestamp,utilization.gpu,memory.used -lms 500 \
            --format=csv,noheader,nounits >"$OUT/card.csv" 2>/dev/null & echo $! >"$PLACE/sampler.pid"
    fi
    exec "$run_python" -m cli.main train configs/one_gpu.yaml "${more[@]}"
}

results() {
    [ "$DEVICE" = cpu ] || kill "$(cat "$PLACE/sampler.pid")"
    local run; run=$(sql "SELECT run_id FROM run ORDER BY created_at DESC LIMIT 1" | tail -n 1)
    rm -rf "$PLACE/run" && mkdir "$PLACE/run"
    figures "$run" | tee "$OUT/figures.csv"
    sql "SELECT step, name, value FROM metric WHERE run_id = '$run' ORDER BY step, name" >"$PLACE/run/metrics.csv"
    cp -r "$RATCHET_HOME/logs" "$PLACE/run" && tar czf "$OUT/run.tar.gz" -C "$PLACE" run
    ratchet stop "$run" --now -m "the time of the machine is over"
    while [ "$SECONDS" -lt 60 ]; do
        [ "$(sql "SELECT state FROM run WHERE run_id = '$run'" | tail -n 1)" = running ] || break
    done
    ratchet publish "$run" --out "$PLACE/run/published" && tar czf "$OUT/run.tar.gz" -C "$PLACE" run
    ratchet down --boxes
}

# Name, median and highest value; an empty value was not reached.
figures() {
    sql "WITH r AS (SELECT * FROM run WHERE run_id = '$1'),
g AS (SELECT ended_at, row_number() OVER (ORDER BY ended_at) AS n,
  avg(reward) OVER (ORDER BY ended_at ROWS 63 PRECEDING) AS rate
  FROM rollout WHERE run_id = '$1' AND purpose = 'train' AND reward IS NOT NULL),
t AS (SELECT t.* FROM turn t JOIN rollout o ON o.id = t.rollout_id WHERE o.run_id = '$1')
SELECT name, percentile_cont(0.5) WITHIN GROUP (ORDER BY value) AS median, max(value) AS highest FROM metric
WHERE run_id = '$1' AND (name LIKE '%seconds' OR name LIKE '%per_second' OR name = 'mfu') GROUP BY name
UNION ALL SELECT 'engine_tokens_per_second', sum(num_sampled) / extract(epoch FROM max(completed_at) - min(created_at)), NULL FROM t
UNION ALL SELECT 'minutes_to_first_step', extract(epoch FROM min(stepped_at) - (SELECT created_at FROM r)) / 60, NULL
  FROM batch WHERE run_id = '$1'
UNION ALL SELECT 'minutes_to_gain_of_0.10', extract(epoch FROM min(g.ended_at) - (SELECT created_at FROM r)) / 60, NULL
  FROM g WHERE n > 64 AND rate >= 0.1 + (SELECT rate FROM g WHERE n = 64)"
    [ "$DEVICE" = cpu ] || awk -F', ' '$2 == 0 { idle++ } END { print "idle_share_of_card," idle / NR "," }' "$OUT/card.csv"
}

trees() { "$run_python" -m tests.benchmarks.gpu --only trees --seconds 100 $toy; }
pause() { "$run_python" -m tests.benchmarks.gpu_loop $toy; }

# Runs one stage for so many seconds at most; its output goes to the log, and lines of progress to the summary, too.
stage() {
    local name=$1 left=$((${TOTAL:-570} - $(date +%s) + STARTED)) limit=$(($2 * ${SLOW:-1}))
    [ "$left" -lt "$limit" ] && limit=$left
    if [ "$limit" -lt 15 ]; then say "$name: left out, the time is over"; return; fi
    say "$name: at most $limit s"
    timeout -k 10 "$limit" bash "$here/one_gpu.sh" "run-$name" 2>&1 | tee -a "$OUT/log.txt" |
        grep --line-buffered -E '^\[ *[0-9.]+ s\]|^\{|^ok |^ +GPU|,[0-9.]*$|rror' | sed -u 's/^/    /; s/^\(.\{200\}\).*/\1/' |
        tee -a "$OUT/summary.txt"
    local code=${PIPESTATUS[0]}
    case $code in 0) say "$name: done" ;; 124) say "$name: its time is over" ;; *) say "$name: exit code $code; see log.txt" ;; esac
}

case "${1:-}" in
keep) keep ;;
run-*) cd "$repository" 2>/dev/null || cd "$PLACE"; export PATH=$PATH:$PLACE/bin && "${1#run-}" ;;
*)
    declare -A limits=([unpack]=120 [environment]=90 [model]=90 [load]=90 [loop]=240 [results]=90
        [trees]=130 [pause]=120)
    for name in ${*:-unpack environment model load loop results trees pause}; do stage "$name" "${limits[$name]}"; done
    ;;
esac
