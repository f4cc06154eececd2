# Run one test command as TESTS_USER and report over stdout, framed by a nonce that only root of this box can read.
#
# `grading/run_hidden_tests.py` puts assignments of NONCE, TOKENS, TESTS_USER, SECONDS_ALLOWED, COMMAND_FILE, WORKDIR,
# HEAD_BYTES, TAIL_BYTES, FRAME_BYTES and WITNESS in front of this file. All processes of the tests are dead before the report is written.
set -u
state=/run/ratchet witness=/run/ratchet-witness
rm -rf "$witness" "$state/log" "$state/frames" "$state/out" "$state/never" "$state/timed_out"
mkdir -p "$witness" && chmod 755 "$witness"
mkfifo -m 622 "$witness/frames" && mkfifo -m 644 "$witness/nonce" && mkfifo -m 600 "$state/out" "$state/never" || exit 70
chmod 622 "$witness/frames" || exit 70
for file in ratchet_witness.py sitecustomize.py; do cp "$state/$file" "$witness/" && chmod 644 "$witness/$file" || exit 70; done
# Tests to run, of which the host has put digests here; without this file all run.
[ ! -e "$state/selected" ] || { cp "$state/selected" "$witness/" && chmod 644 "$witness/selected"; } || exit 70
# Files of the base that the patch changes, and all that it writes, for flags; a repository that was not prepared for grading has none.
for list in changed:MTD patched:MTA; do
    git --git-dir="$state/base.git" diff --cached --name-only -z --no-renames --diff-filter=${list#*:} HEAD >"$witness/${list%:*}" 2>/dev/null
    chmod 644 "$witness/${list%:*}" || exit 70
done
uid=$(id -u "$TESTS_USER") && gid=$(id -g "$TESTS_USER") || exit 70
mapped=1; [ -r /proc/self/uid_map ] && mapped= && while read -r first _ count; do
    [ "$uid" -ge "$first" ] && [ $((uid - first)) -lt "$count" ] && mapped=1
done </proc/self/uid_map
[ -n "$mapped" ] || { echo "this box has one user: its gateway cannot map the id $uid of $TESTS_USER" >&2; exit 70; }
if [ "$TESTS_USER" = root ]; then
    become=(setsid); command -v setsid >/dev/null || { echo "setsid is not in this image" >&2; exit 70; }
elif [ "$uid" = 0 ]; then echo "user $TESTS_USER has the id of root; name root" >&2; exit 70
elif command -v setpriv >/dev/null; then become=(setpriv "--reuid=$uid" "--regid=$gid" --init-groups --no-new-privs)
elif command -v runuser >/dev/null; then become=(runuser -u "$TESTS_USER" --)
else echo "neither setpriv nor runuser is in this image" >&2; exit 70; fi
command=$(cat "$COMMAND_FILE")
home=/; while IFS=: read -r name _ _ _ _ directory _; do [ "$name" = "$TESTS_USER" ] && home=$directory; done </etc/passwd

stat_of() {  # argument: a process directory; set `stat` to the fields after its name: state, parent, group, session, ...
    local fields="" try
    for try in 1 2 3; do  # a signal may cut a read, which then has a part of the file
        { read -r -d '' fields <"$1/stat"; } 2>/dev/null
        # A process chooses its name, line ends and patterns of file names included; the fields are numbers.
        [[ ${fields##*) } =~ ^[A-Za-z][0-9\ -]+$ ]] || continue
        stat=(${fields##*) })
        [ ${#stat[@]} -lt 15 ] || return 0
    done
    return 1
}
# The tests of root have a session of their own, and none of their processes can join an older one.
sessions=" "; for process in /proc/[0-9]*; do stat_of "$process" && sessions+="${stat[3]} "; done

of_tests() {  # argument: a process directory; only builtins, because no further process may be possible
    local key value
    [ "$uid" != 0 ] || { stat_of "$1" && [[ $sessions != *" ${stat[3]} "* ]]; return; }
    { while read -r key value _; do [ "$key" = Uid: ] && { [ "$value" = "$uid" ]; return; }; done <"$1/status"; } 2>/dev/null
    return 1
}
end_tests() {  # stop all processes first, so that a fork bomb cannot outrun the kills
    local signal process
    for signal in STOP STOP KILL KILL; do
        for process in /proc/[0-9]*; do
            of_tests "$process" && kill -"$signal" "${process#/proc/}" 2>/dev/null
        done
    done
}
ticks_of() {  # argument: a process directory; set `ticks` to its CPU time with that of its ended children
    ticks=0
    stat_of "$1" && ticks=$((stat[11] + stat[12] + stat[13] + stat[14]))
}
time_out() {  # record the CPU time that the tests got, and the longest time that one of them waited for a core, in ns
    local process task run wait ran waited=0
    ticks_of /proc/1; ran=$((ticks - init_ticks))
    for process in /proc/[0-9]*; do
        of_tests "$process" || continue
        ticks_of "$process"; ran=$((ran + ticks))
        { read -r run wait _ <"$process/schedstat"; } 2>/dev/null && [ "$wait" -gt "$waited" ] && waited=$wait
    done
    echo "1 $((ran * 10000000)) $waited" >"$state/timed_out"
    end_tests
}
ticks_of /proc/1; init_ticks=$ticks

# Every reader of the pipe gets a token of its own; the pipe stays open here, so that a reader never blocks.
exec 8<>"$witness/nonce"
printf '%s\n' $TOKENS >&8
{ head -c "$FRAME_BYTES"; cat >/dev/null; } <"$witness/frames" >"$state/frames" 8>&- &
reader=$!
exec 9>"$witness/frames"
{ head -c "$HEAD_BYTES"; tail -c "$TAIL_BYTES"; } <"$state/out" >"$state/log" 8>&- 9>&- &
logger=$!
(
    exec 8>&- 9>&-
    cd "$WORKDIR" || exit 126
    export HOME="$home" USER="$TESTS_USER" LOGNAME="$TESTS_USER"
    # Protected directories are root's, and git refuses to work in a repository of another user.
    export GIT_CONFIG_COUNT=1 GIT_CONFIG_KEY_0=safe.directory GIT_CONFIG_VALUE_0='*'
    if [ -n "$WITNESS" ]; then
        export RATCHET_WITNESS="$witness" RATCHET_WORKDIR="$WORKDIR"
        export PYTEST_PLUGINS="ratchet_witness${PYTEST_PLUGINS:+,$PYTEST_PLUGINS}"
        export PYTHONPATH="$witness${PYTHONPATH:+:$PYTHONPATH}"
        # Otherwise go prints the same of a package whose process ends before its tests.
        export GOFLAGS="-v${GOFLAGS:+ $GOFLAGS}"
    fi
    exec "${become[@]}" bash -l -c "$command"
) </dev/null >"$state/out" 2>&1 &
child=$!
( exec 8>&- 9>&- 0<>"$state/never" >/dev/null; read -r -t "$SECONDS_ALLOWED" _; time_out ) &
timer=$!

wait "$child"; code=$?
end_tests
kill -KILL "$timer" 2>/dev/null
wait "$timer" 2>/dev/null
exec 9>&-
wait "$reader" "$logger" 2>/dev/null
ticks_of /proc/$$; how="0 $((ticks * 10000000)) 0"  # with its ended children
[ -e "$state/timed_out" ] && how=$(cat "$state/timed_out")

printf '%s log\n' "$NONCE"; cat "$state/log"
printf '\n%s frames\n' "$NONCE"; cat "$state/frames"
printf '\n%s end %s %s\n' "$NONCE" "$code" "$how"
exit 0
