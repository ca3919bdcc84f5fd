# Shared by the scripts beside this file. Sourced, never run.
#
# ensure_venv   leaves $venv/bin/python able to run the checkout: made and installed once, installed again only when
#               pyproject.toml or constraints.txt has changed, the checkout has moved, or an install did not finish.

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
venv="$root/.venv"
say_every_s=4

say() { printf '%s\n' "$*" >&2; }

# Prints a Python that is new enough: $PYTHON where set, else the first on the PATH.
find_python() {
    local candidate
    for candidate in ${PYTHON:+"$PYTHON"} python3 python3.11 python3.12 python3.13 python3.14 python; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            printf '%s\n' "$candidate"
            return
        fi
    done
    say "error: no Python 3.11 or newer found (tried ${PYTHON:+$PYTHON, }python3, python3.11 to python3.14, python)."
    say "Install one, or name it: PYTHON=/path/to/python $0"
    return 1
}

# What an install depends on; the checkout's own path too, because an editable install points at it.
fingerprint() { { printf '%s\n' "$root"; cat "$root/pyproject.toml" "$root/constraints.txt"; } | cksum; }

installed() { [[ -x "$venv/bin/python" && "$(cat "$venv/.installed" 2>/dev/null)" == "$1" ]]; }

ensure_venv() {
    local want python
    want="$(fingerprint)"
    if installed "$want"; then return; fi
    python="$(find_python)"

    # The lock belongs to descriptor 9 of this shell, so it ends with this shell however that ends.
    exec 9>"$root/.venv.lock"
    if ! "$python" -c 'import fcntl; fcntl.flock(9, fcntl.LOCK_EX | fcntl.LOCK_NB)' 2>/dev/null; then
        say "waiting for another install in this checkout to finish"
        "$python" -c 'import fcntl; fcntl.flock(9, fcntl.LOCK_EX)'
    fi
    if ! installed "$want"; then install "$want" "$python"; fi
    exec 9>&-
}

# Runs a command that installs, and says every few seconds what it is doing. What it printed is shown if it fails.
narrated() {
    local log="$venv/install.log" narrator
    : >"$log"
    narrate "$log" 9>&- &
    narrator=$!
    if "$@" --progress-bar off >"$log" 2>&1; then
        kill "$narrator" 2>/dev/null || true
    else
        kill "$narrator" 2>/dev/null || true
        tail -n 40 "$log" >&2
        say "error: this did not succeed ($log has all that it printed): $*"
        return 1
    fi
}

# Prints the time and the last line of a log every few seconds, as long as this script lives.
narrate() {
    local since=$SECONDS next=$say_every_s
    while sleep 0.2 && kill -0 $$ 2>/dev/null; do
        if ((SECONDS - since >= next)); then
            say "  $((SECONDS - since)) s: $(tail -n 1 "$1" | cut -c 1-100)"
            next=$((SECONDS - since + say_every_s))
        fi
    done
}

# The stamp is removed first and written last: an interrupted install is seen as none.
install() {
    local pip=("$venv/bin/python" -m pip --disable-pip-version-check)
    rm -f "$venv/.installed"
    if ! "${pip[@]}" --version >/dev/null 2>&1; then
        say "making $venv with $("$2" --version)"
        "$2" -m venv --clear "$venv"
    fi
    say "installing the engine and its pinned dependencies into $venv (the first time takes some minutes)"
    # What builds comes from the pins as well, so nothing unpinned is fetched to build with. setuptools and wheel are for
    # antlr4-python3-runtime, which Hydra needs and which comes as source only: a new virtual environment has no wheel,
    # and from Python 3.12 on no setuptools either.
    narrated "${pip[@]}" install -c "$root/constraints.txt" hatchling setuptools wheel
    narrated "${pip[@]}" install -c "$root/constraints.txt" --no-build-isolation -e "$root[dev]"
    printf '%s\n' "$1" >"$venv/.installed"
    say "installed"
}
