# Make the history of the repository at $workdir unreadable for every user but root. `prepare_script` runs it in a
# subshell in the workdir, before .git is replaced. $original: where root of a grading box needs the repository, else
# empty; $hidden: a directory of root for what has to leave the workdir of such a box.
#
# Hidden are the git directories that the workdir, its parents and its links name, whatever these borrow objects from,
# bundles, and every other repository of the box that has a recent commit of this one. Tracked files stay.

set +e
export GIT_NO_LAZY_FETCH=1
declare -A seen=()
stores=()
place=$(pwd -P)
known=$(mktemp)

git() { command git -c safe.directory='*' --literal-pathspecs "$@"; }

add_store() { # a git directory, a directory of objects, a pack or a bundle; a relative path begins at $2
  local path line store
  path=$(cd -- "${2:-.}" 2>/dev/null && realpath -eq -- "$1") || return 0
  [ -z "${seen[$path]}" ] || return 0
  seen[$path]=1
  stores+=("$path")
  [ -d "$path" ] || return 0
  for store in "$path" "$path/objects"; do
    [ -f "$store/info/alternates" ] || continue
    while IFS= read -r line || [ -n "$line" ]; do
      case $line in '' | '#'*) ;; *) add_store "$line" "$store" ;; esac
    done < "$store/info/alternates"
  done
  [ ! -f "$path/commondir" ] || add_store "$(< "$path/commondir")" "$path"
  while IFS= read -r -d '' line; do add_store "$line"; done < <(
    find "$path/objects" "$path/refs" "$path/pack" -type l -print0 2>/dev/null
  )
  while IFS= read -r -d '' line; do
    line=${line#*$'\n'}
    add_repository "${line#file://}" "$path/.."
    add_repository "${line#file://}.git" "$path/.."
  done < <(git config -f "$path/config" --null --get-regexp '^remote\..*\.(push)?url$' 2>/dev/null)
}

add_repository() { # a working tree, a .git file, a bare repository or a bundle; any other path is ignored
  local path line=
  path=$(cd -- "${2:-.}" 2>/dev/null && realpath -eq -- "$1") || return 0
  if [ -f "$path" ]; then
    IFS= read -r -n 4200 line < "$path"
    case $line in
      'gitdir: '*) add_store "${line#gitdir: }" "${path%/*}" ;;
      '# v'[0-9]' git bundle') add_store "$path" ;;
    esac
  elif [ -f "$path/.git" ]; then
    add_repository "$path/.git"
  elif [ -d "$path/.git" ]; then
    add_store "$path/.git"
  elif [ -f "$path/HEAD" ] && [ -e "$path/objects" -o -f "$path/commondir" ]; then
    add_store "$path"
  fi
}

add_with_parents() {
  local path=$1
  while [ -z "${seen[parents of $path]}" ]; do
    seen[parents of $path]=1
    add_repository "${path:-/}"
    path=${path%/*}
  done
}

is_bundle() {
  local line=
  [ -f "$1" ] && [ -r "$1" ] && IFS= read -r -n 40 line < "$1"
  case $line in '# v'[0-9]' git bundle') return 0 ;; *) return 1 ;; esac
}

shares_history() { # whether a git directory, or a pack outside of one, has an object of $known
  case $1 in
    *.pack)
      [ ! -f "${1%/*/*/*}/HEAD" ] && [ -f "${1%.pack}.idx" ] &&
        command git show-index < "${1%.pack}.idx" 2>/dev/null | cut -d ' ' -f 2 | grep -qxFf "$known" ;;
    *) git --git-dir="$1" cat-file --batch-check < "$known" 2>/dev/null | grep -qv ' missing$' ;;
  esac
}

add_named() {
  local path
  add_with_parents "$place"
  add_with_parents "$workdir"
  while IFS= read -r -d '' path; do add_repository "${path%/*}"; done < <(find . -name .git -print0)
  while IFS= read -r -d '' path; do
    case $path in "$place"/*) ;; *) add_with_parents "$path" ;; esac
  done < <(find . -name .git -prune -o -type l -exec realpath -eqz -- {} + | sort -zu)
  path=$place
  while path=${path%/*} && [ -n "$path" ]; do # beside the workdir a bundle may have any name
    for line in "$path"/* "$path"/.[!.]*; do
      if is_bundle "$line"; then add_store "$line"; fi
    done
  done
}

add_related() {
  local path
  # Commits, and their trees, which a history that was cut and begun anew keeps.
  git log --max-count=20 --format='%H%n%T' HEAD > "$known" 2>/dev/null || return 0
  while IFS= read -r -d '' path; do
    case $path in
      *.bundle) if is_bundle "$path"; then add_store "$path"; fi ;;
      *.pack) if shares_history "$path"; then add_store "$path"; fi ;;
      *) if shares_history "${path%/HEAD}"; then add_store "${path%/HEAD}"; fi ;;
    esac
  done < <(
    # Package directories and the system's own hold no clones, and are most of an image.
    find / "$place" -xdev \( -path /proc -o -path /sys -o -path /dev -o -path /run/ratchet -o -path "$place/.git" \
      -o -path /usr/lib -o -path /usr/share -o -name node_modules -o -name site-packages -o -name dist-packages \) \
      -prune -o -type f \( -name HEAD -o -name '*.pack' -o -name '*.bundle' \) -print0 2>/dev/null
  )
}

lock() {
  if [ -e "$1" ] && ! { chown root: -- "$1" && chmod go-rwx -- "$1"; } 2>/dev/null; then
    echo "$1 holds history of the repository and cannot be hidden (read-only?): remove it from the image" >&2
    exit 1
  fi
}

hide_store() {
  local path=$1 part
  case $place/ in "$path"/*) # the workdir is inside, and its user must pass
    for part in objects refs logs packed-refs; do lock "$path/$part"; done
    return ;;
  esac
  case $path in
    "$place"/.git | "$place"/.git/*) ;; # replaced by prepare_script
    "$place"/*)
      if [ -n "$(git ls-files -- "$path" 2>/dev/null | head -n 1)" ]; then return 0; fi
      if [ -z "$original" ]; then rm -rf -- "$path"; return 0; fi
      mkdir -p "$hidden" && mv -- "$path" "$hidden/$2" || exit 1
      if [ "$path" = "$own" ]; then own=$hidden/$2; fi ;;
    *) lock "$path" ;;
  esac
}

keep_original() {
  rm -rf "$original"
  if [ ! -d .git ] || [ -L .git ]; then
    if [ -n "$own" ]; then ln -s "$own" "$original"; fi
    return
  fi
  if [ -f .git/objects/info/alternates ]; then # relative paths would break
    absolute=$(cd .git/objects && xargs -rd '\n' realpath -m -- < info/alternates)
    printf '%s\n' "$absolute" > .git/objects/info/alternates
  fi
  mv .git "$original" || exit 1
}

own=$(realpath -eq -- "$(git rev-parse --absolute-git-dir 2>/dev/null)")
add_named
add_related
for number in "${!stores[@]}"; do hide_store "${stores[$number]}" "$number"; done
if [ -n "$original" ]; then keep_original; fi
rm -f "$known"
