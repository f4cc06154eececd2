#!/bin/sh
# Start an agent in a box exactly once, suspend it at its deadline, and end all its processes.
#
# Any number of tries may run `start`: `mkdir` is atomic, so one of them starts the agent. POSIX sh, because an image may
# lack Python. Runs as root, out of the reach of the agent's user; `launcher.py` runs the subcommands.
#
#   launcher.sh start ATTEMPT USER BUDGET_SECONDS INCOMING   exit 17: started already
#   launcher.sh wait ATTEMPT                                 prints exit.json, then the tail of the agent's stderr; for
#                                                            a suspended tree, only a record that says so
#   launcher.sh deadline ATTEMPT WAITED_SECONDS              deadline = started + budget + WAITED_SECONDS
#   launcher.sh resume ATTEMPT SECONDS                       a suspended tree goes on; deadline = now + SECONDS
#   launcher.sh stop ATTEMPT REASON                          ends the tree now, recorded as REASON; the reason
#                                                            `deadline` ends only a suspended tree
#   launcher.sh end ATTEMPT                                  ends the tree; exit 1: something is left
#
# Only a worker knows for how long the agent has waited for an engine or an adapter. So the deadline suspends the tree
# until a worker says `resume` or `stop`.
#
# | state of the tree | file that says so | made by         | next                                               |
# |-------------------|-------------------|-----------------|----------------------------------------------------|
# | running           | launcher          | supervise       | suspended, ended                                   |
# | suspended         | reached           | keep_deadline   | running: `resume` removes the file; ended: `stop`  |
# | being ended       | deadline_hit      | stop            | ended; the file holds the reason                   |
# | being ended       | end_wanted        | end, and before | ended, or never started                            |
# | ended             | exit.json         | supervise       |                                                    |
#
# $RUN/ATTEMPT (root only): the files above, and launcher.sh budget started user token deadline output errors
# $RUN-agent/ATTEMPT (readable by the agent): command.sh and what it needs. Clocks are seconds of /proc/uptime.
# The agent's tree is every process of its user, also those with a session or process group of their own.
# Builtins are preferred, because starting a program costs a millisecond of CPU in every rollout.
set -u
umask 077
RUN=${RATCHET_RUN_DIR:-/run/ratchet}

fail() { printf 'launcher: %s\n' "$2" >&2; exit "$1"; }

# 12.34 -> $centis=1234; the 1 before the fraction keeps 08 from being read as octal
to_centis() {
  case $1 in *.*) fraction=${1#*.}00 ;; *) fraction=00 ;; esac
  fraction=${fraction%"${fraction#??}"}
  centis=$((${1%%.*} * 100 + 1$fraction - 100))
}
from_centis() { printf '%d.%02d\n' $(($1 / 100)) $(($1 % 100)); }
now() { read -r uptime _ </proc/uptime; to_centis "$uptime"; }

# write NAME TEXT: by rename, so a reader never sees half a file
write() { printf '%s\n' "$2" >"$dir/.$1.$$" && mv -f "$dir/.$1.$$" "$dir/$1"; }

# $start_time of process $1 in clock ticks since boot; the command's name may hold spaces and brackets
process_start() {
  start_time=
  { read -r stat <"/proc/$1/stat"; } 2>/dev/null || return 1
  set -- ${stat##*) }
  case $1 in Z | X) return 1 ;; esac
  start_time=${20}
}

launcher_alive() {
  [ -f "$dir/launcher" ] || return 1
  read -r boot pid recorded <"$dir/launcher"
  read -r boot_now </proc/sys/kernel/random/boot_id
  [ "$boot" = "$boot_now" ] && process_start "$pid" && [ "$start_time" = "$recorded" ]
}

resolve_user() {
  groups=--init-groups
  uid=$(id -u "$1" 2>/dev/null) || { uid=$1; groups=--clear-groups; }
  gid=$(id -g "$1" 2>/dev/null) || gid=$uid
  case $uid in '' | *[!0-9]*) fail 2 "no user $1 in this box" ;; esac
  [ "$uid" != "$(id -u)" ] || fail 2 "the agent needs a user other than the launcher's"
  [ -e /proc/self/uid_map ] || return 0
  while read -r first _ count; do
    if [ "$uid" -ge "$first" ] && [ $((uid - first)) -lt "$count" ]; then return; fi
  done </proc/self/uid_map
  fail 2 "this box has one user: its gateway cannot map the id $uid of $1; \`ratchet doctor\` names the remedy"
}

# The user as `start` found it; the agent may have changed /etc/passwd since.
read_user() { read -r user uid gid groups <"$dir/user"; }

home_of() {
  home=/tmp
  while IFS=: read -r _ _ id _ _ folder _; do [ "$id" = "$1" ] && [ -d "$folder" ] && home=$folder && return; done </etc/passwd
}

# Without new privileges, no sudo or setuid program can take a process out of the tree.
as_user() {
  if command -v setpriv >/dev/null 2>&1; then
    setpriv --reuid "$uid" --regid "$gid" $groups --no-new-privs "$@"
  else
    [ "$(id -u "$user" 2>/dev/null)" = "$uid" ] || fail 2 "$user is no longer user $uid"
    script=$1; shift
    su -s "$script" "$user" "$@"
  fi
}

# $left: the processes of the agent's user that are not zombies, and not stopped either if $1 is `running`
find_tree() {
  left=
  for status in /proc/[0-9]*/status; do
    state=
    { while read -r key first second third _; do
      case $key in
        State:) state=$first ;;
        Uid:)
          case $state${1-} in Z* | X* | [Tt]running) break ;; esac
          if [ "$first" = "$uid" ] || [ "$second" = "$uid" ] || [ "$third" = "$uid" ]; then
            process=${status#/proc/}
            left="$left ${process%/status}"
          fi
          break ;;
      esac
    done <"$status"; } 2>/dev/null
  done
}

# kill -1 by the user itself reaches all of them in one system call: nothing can fork its way out of it
end_tree() {
  rounds=0 groups=--clear-groups
  find_tree
  while [ -n "$left" ]; do
    rounds=$((rounds + 1))
    [ $rounds -le 100 ] || return 1
    as_user /bin/sh -c 'kill -9 -1' >/dev/null 2>&1
    find_tree
    [ -z "$left" ] || sleep 0.05
  done
}

# Sent once, the signal is pending for all of them, and Linux forks no process from one with a pending signal. A process
# in uninterruptible sleep stops when it leaves it, so that it is waited for only for some seconds.
suspend_tree() {
  rounds=0 groups=--clear-groups
  find_tree running
  while [ -n "$left" ] && [ $rounds -lt 50 ]; do
    rounds=$((rounds + 1))
    as_user /bin/sh -c 'kill -STOP -1' >/dev/null 2>&1
    find_tree running
    [ -z "$left" ] || sleep 0.05
  done
}

start() { # ATTEMPT USER BUDGET_SECONDS INCOMING
  user=$2 incoming=$4
  resolve_user "$user"
  mkdir -p "$RUN" && chmod 700 "$RUN" || fail 1 "cannot make $RUN"
  if ! mkdir "$dir" 2>/dev/null; then
    [ -d "$dir" ] || fail 1 "cannot make $dir"
    rm -rf "$incoming"
    exit 17
  fi
  (umask 022; mkdir -p "$RUN-agent") && chmod 755 "$incoming/agent" && chmod 644 "$incoming/agent"/* &&
    mv "$incoming/agent" "$RUN-agent/$1" && mv "$incoming/token" "$incoming/launcher.sh" "$dir/" && rmdir "$incoming" ||
    fail 1 "cannot unpack $incoming"
  now
  # The user file is written last: a reader that finds it finds the others, too.
  echo "$3" >"$dir/budget" && from_centis "$centis" >"$dir/started" && set_deadline 0 && write user "$user $uid $gid $groups" ||
    fail 1 "cannot write to $dir"
  detach=$(command -v setsid) || detach=
  $detach sh "$dir/launcher.sh" supervise "$1" </dev/null >/dev/null 2>"$dir/launcher.log" &
}

set_deadline() { # WAITED_SECONDS
  read -r began <"$dir/started"; read -r budget <"$dir/budget"
  to_centis "$began"; sum=$centis; to_centis "$budget"; sum=$((sum + centis)); to_centis "$1"
  write deadline "$(from_centis $((sum + centis)))"
}

# The only process that suspends the tree and lets it go on. After each `resume` the agent runs for at least a second.
keep_deadline() {
  while sleep 1 && [ -d "$dir" ]; do
    read -r limit <"$dir/deadline" || continue
    to_centis "$limit"; limit=$centis; now
    [ "$centis" -ge "$limit" ] || continue
    suspend_tree
    write reached "$(from_centis "$centis")"
    while [ -f "$dir/reached" ]; do sleep 1; done
    as_user /bin/sh -c 'kill -CONT -1' >/dev/null 2>&1
  done
}

# The deadline is written first: `keep_deadline` reads it when the file `reached` is gone.
resume() { # ATTEMPT SECONDS
  [ -f "$dir/reached" ] || exit 0
  to_centis "$2"; more=$centis; now
  write deadline "$(from_centis $((centis + more)))" && rm -f "$dir/reached"
}

# Write the reason first, then end the tree.
stop() { # ATTEMPT REASON
  [ -f "$dir/user" ] || exit 0
  [ ! -f "$dir/exit.json" ] || exit 0
  [ "$2" != deadline ] || [ -f "$dir/reached" ] || exit 0
  read_user
  [ -s "$dir/deadline_hit" ] || write deadline_hit "$2"
  end_tree || fail 1 "processes of $user are left:$left"
}

supervise() { # ATTEMPT
  read_user; home_of "$uid"
  read -r boot </proc/sys/kernel/random/boot_id
  process_start $$
  write launcher "$boot $$ $start_time"
  read -r RATCHET_SESSION_TOKEN <"$dir/token"; rm -f "$dir/token"
  export RATCHET_SESSION_TOKEN HOME="$home" USER="$user"
  if [ -f "$dir/end_wanted" ]; then
    write exit.json "$(record_exit null ended)"
    return
  fi
  (umask 022; cd "$RUN-agent/$1" && as_user /bin/sh "$RUN-agent/$1/command.sh") >>"$dir/output" 2>>"$dir/errors" &
  agent=$!
  unset RATCHET_SESSION_TOKEN
  keep_deadline & watch=$!
  wait "$agent"; code=$?
  reason=exit
  if [ -s "$dir/deadline_hit" ]; then read -r reason <"$dir/deadline_hit"; fi
  kill "$watch" 2>/dev/null
  [ ! -f "$dir/end_wanted" ] || reason=ended
  write exit.json "$(record_exit "$code" "$reason")"
}

# The time for which the tree was suspended at its end is not used time.
record_exit() { # EXIT_CODE REASON
  now; ended=$centis; used_until=$(from_centis "$ended")
  [ ! -f "$dir/reached" ] || read -r used_until <"$dir/reached"
  to_centis "$used_until"; used=$centis
  read -r began <"$dir/started"; to_centis "$began"
  printf '{"exit_code": %s, "reason": "%s", "started": %s, "ended": %s, "used_seconds": %s}\n' \
    "$1" "$2" "$began" "$(from_centis "$ended")" "$(from_centis $((used - centis)))"
}

# A launcher that writes nothing within some seconds died between `mkdir` and its first line.
await() {
  [ -d "$dir" ] || fail 3 "attempt was never started in this box"
  looks=0 unseen=0
  while [ ! -f "$dir/exit.json" ]; do
    looks=$((looks + 1))
    if [ -f "$dir/launcher" ]; then launcher_alive || break; else unseen=$((unseen + 1)); [ $unseen -lt 25 ] || break; fi
    # What was decided is not asked again while the tree is being ended.
    if [ -f "$dir/reached" ] && [ ! -s "$dir/deadline_hit" ] && [ ! -f "$dir/end_wanted" ]; then
      record_exit null reached
      return
    fi
    if [ $looks -lt 10 ]; then sleep 0.2; else sleep 0.5; fi
  done
  if [ -f "$dir/exit.json" ]; then cat "$dir/exit.json"; else record_exit null crashed; fi
  [ ! -s "$dir/errors" ] || tail -c 1000 "$dir/errors"
}

# Nothing may start the agent after this returns, so the launcher must be dead before the last check of the tree.
end() {
  [ -d "$dir" ] || exit 0
  : >"$dir/end_wanted" # first, so that a start in progress finds it and launches nothing
  [ -f "$dir/user" ] || exit 0
  read_user
  end_tree
  rounds=0
  while [ ! -f "$dir/launcher" ] && [ $rounds -lt 20 ]; do rounds=$((rounds + 1)); sleep 0.1; done
  # A launcher that checked `end_wanted` just before it was written starts its agent now, which is ended, too.
  rounds=0
  while launcher_alive && [ $rounds -lt 50 ]; do rounds=$((rounds + 1)); end_tree; sleep 0.1; done
  launcher_alive && kill -9 "$pid"
  end_tree || fail 1 "processes of $user are left:$left"
}

[ $# -ge 2 ] || fail 2 "usage: launcher.sh start|wait|deadline|resume|stop|end ATTEMPT ..."
command=$1; shift
dir=$RUN/$1
case $command in
  start) start "$@" ;;
  supervise) supervise "$@" ;;
  wait) await ;;
  deadline) set_deadline "$2" ;;
  resume) resume "$@" ;;
  stop) stop "$@" ;;
  end) end ;;
  *) fail 2 "unknown command $command" ;;
esac
