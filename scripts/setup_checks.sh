# shellcheck shell=bash disable=SC2034,SC2153,SC2154
# Sourced by setup.sh: what must be there before anything is downloaded, and how to get it.

say() { printf '\033[1m==>\033[0m %s\n' "$*"; }

# refuse WHAT FIX: stop with the reason and the command that helps.
refuse() {
    printf '\nsetup: %s\n       %s\n' "$1" "$2" >&2
    exit 2
}

# step TITLE HINT COMMAND…: run quietly; on failure show the end of the log and what to try.
# The command runs in a subshell of its own: as the condition of an `if` it would run on after a failure inside.
step() {
    local title=$1 hint=$2 begun=$SECONDS rc
    shift 2
    printf '\033[1m==>\033[0m %s … ' "$title"
    set +e
    (
        set -e
        "$@"
    ) >> "$log" 2>&1
    rc=$?
    set -e
    if [ "$rc" = 0 ]; then
        printf '%s s\n' "$((SECONDS - begun))"
    else
        printf 'failed\n\n'
        tail -n 25 "$log" >&2
        printf '\nsetup: "%s" failed; the whole log is %s\n       What to try: %s\n' "$title" "$log" "$hint" >&2
        exit 1
    fi
}

# PATH without the bin folders of VENV and of any other environment made by setup.sh.
path_without_environments() {
    local folder kept='' folders
    IFS=: read -r -a folders <<< "$PATH"
    for folder in "${folders[@]}"; do
        folder=${folder:-.}
        [ -e "$folder/../.hvdvars-made" ] && continue
        [ "$(realpath -m -- "$folder")" = "$1/bin" ] && continue
        kept+=${kept:+:}$folder
    done
    printf '%s' "$kept"
}

# The Python versions that a TensorFlow release has wheels for.
python_range() {
    case $1 in
        2.15.*) echo "10 11" ;;
        2.16.* | 2.17.* | 2.18.* | 2.19.*) echo "10 12" ;;
        2.2[0-9].*) echo "10 12" ;;
        *) refuse "TF_VERSION=$1 is not known here." "Use 2.15.1, 2.16.2, 2.18.1 or 2.21.0: make demo TF_VERSION=2.21.0" ;;
    esac
}

find_python() {
    local python=$1 range lowest highest minor
    range=$(python_range "$2") || exit 2
    lowest=${range% *} highest=${range#* }
    command -v "$python" >/dev/null 2>&1 ||
        refuse "No '$python' on PATH." "apt-get install python3 python3-venv python3-dev, or PYTHON=/path/to/python3.11 make demo"
    case $(realpath -m -s -- "$(command -v "$python")") in
        "$VENV"/*) refuse "PYTHON=$python lies in $VENV, which is made from it." "Name the interpreter outside: PYTHON=python3.11 make demo" ;;
    esac
    minor=$("$python" -c 'import sys; print(sys.version_info[1] if sys.version_info[0] == 3 else 0)') ||
        refuse "'$python' does not run." "Choose another interpreter: PYTHON=python3.11 make demo"
    if [ "$minor" -lt "$lowest" ] || [ "$minor" -gt "$highest" ]; then
        refuse "TensorFlow $2 has no tested wheel for $("$python" --version 2>&1); it needs Python 3.$lowest to 3.$highest." \
            "Choose another interpreter: PYTHON=python3.11 make demo"
    fi
    "$python" -c 'import venv, ensurepip' 2>/dev/null ||
        refuse "$python lacks the venv module." "apt-get install python3.$minor-venv"
    [ -e "$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h" ] ||
        refuse "The headers of $python (Python.h) are missing." "apt-get install python3.$minor-dev (Debian, Ubuntu), dnf install python3-devel (Fedora)"
    command -v "$python"
}

check_compiler() {
    local compiler=${CXX:-c++}
    command -v "$compiler" >/dev/null 2>&1 ||
        refuse "No C++ compiler ('$compiler') on PATH." "apt-get install g++ make (Debian, Ubuntu), dnf install gcc-c++ make (Fedora)"
    command -v make >/dev/null 2>&1 || refuse "make is missing." "apt-get install make"
    echo '#include <optional>
int main() { std::optional<int> x{0}; return *x; }' |
        "$compiler" -std=c++17 -x c++ -fsyntax-only - 2>/dev/null ||
        refuse "'$compiler' does not compile C++17." "Install GCC 9 or newer (apt-get install g++) or name one: CXX=g++-12 make demo"
}

# Sets MPI. horovodrun's launcher passes options that only Open MPI 4 takes as they are.
choose_mpi() {
    local version="no mpirun on PATH" suits=0
    ! command -v mpirun >/dev/null 2>&1 || version=$(mpirun --version 2>&1 | head -n 1) || true
    case $version in *"(Open MPI) 4."*) suits=1 ;; esac
    case ${MPI:-} in
        pypi) ;;
        site)
            command -v mpicxx >/dev/null 2>&1 ||
                refuse "MPI=site, but there is no mpicxx on PATH." "Load the site's module (module load openmpi), apt-get install libopenmpi-dev openmpi-bin, or MPI=pypi"
            [ "$suits" = 1 ] ||
                say "Warning: horovodrun's MPI launcher needs Open MPI 4, not '$version'. Start with mpirun or horovodrun --gloo." ;;
        '')
            MPI=pypi
            if command -v mpicxx >/dev/null 2>&1; then
                if [ "$suits" = 1 ]; then
                    MPI=site
                else
                    say "MPI from PyPI: horovodrun needs Open MPI 4, the site's is '$version' (MPI=site takes it all the same)"
                fi
            fi ;;
        *) refuse "MPI=$MPI is neither site nor pypi." "Leave MPI unset, or MPI=pypi make demo" ;;
    esac
}

# Sets fill_wheelhouse, and wheelhouse_difference where the folder holds wheels of another environment.
check_wheelhouse() {
    local parent=$WHEELHOUSE present=$WHEELHOUSE/environment.txt
    [ "$(cat "$present" 2>/dev/null)" != "$environment_key" ] || return 0
    fill_wheelhouse=1
    if [ -e "$present" ]; then
        # Lines with < are what the folder was filled for, lines with > what is wanted here.
        wheelhouse_difference=$(diff <(cat "$present"; echo) <(printf '%s\n' "$environment_key") | grep '^[<>] .') || true
        say "$WHEELHOUSE holds wheels of another environment (<) than this one (>):"
        printf '%s\n' "$wheelhouse_difference"
    fi
    until [ -e "$parent" ]; do parent=$(dirname "$parent"); done
    if [ ! -d "$parent" ] || [ ! -w "$parent" ]; then
        refuse "$WHEELHOUSE holds no wheels for this environment, and cannot be written." \
            "Choose what it was filled for (TF_VERSION, PYTHON, MPI, NCCL, CXX), or another folder to fill."
    fi
}

check_nccl() {
    [ "$NCCL" = 1 ] || refuse "NCCL=$NCCL is neither 0 nor 1." "NCCL=1 make demo"
    [ -x "$CUDA_HOME/bin/nvcc" ] ||
        refuse "NCCL=1 needs the CUDA toolkit, but $CUDA_HOME/bin/nvcc is missing." "Load the site's CUDA module and set CUDA_HOME=/path/to/cuda"
    [ -z "${NCCL_HOME:-}" ] || [ -e "$NCCL_HOME/include/nccl.h" ] ||
        refuse "NCCL_HOME=$NCCL_HOME has no include/nccl.h." "Install NCCL's headers (apt-get install libnccl-dev), or unset NCCL_HOME to use the NCCL of TensorFlow's own wheels"
}

# The CPU wheel is a third of the size, but exists for x86-64 only.
tensorflow_package() {
    if [ "$2" = 1 ]; then
        echo "tensorflow[and-cuda]==$1"
    elif [ "$(uname -m)" = x86_64 ]; then
        echo "tensorflow-cpu==$1"
    else
        echo "tensorflow==$1"
    fi
}

# All that a compiled Horovod depends on: the key of the cached wheel, and of the environment.
describe_environment() {
    echo "horovod $HOROVOD_VERSION, recipe $RECIPE $(printf '%s' "$GPU_BRIDGE" | sha256sum | cut -c1-12)"
    echo "$tf_package"
    echo "$python_tag $("$PYTHON" -c 'import sysconfig; print(sysconfig.get_platform())')"
    if [ "$MPI" = site ]; then
        echo "mpi $(command -v mpicxx) $(mpicxx -show 2>/dev/null) $(mpirun --version 2>/dev/null | head -n 1)"
    else
        echo "mpi openmpi==$OPENMPI_VERSION"
    fi
    echo "compiler $("${CXX:-c++}" --version | head -n 1)"
    [ "$NCCL" = 0 ] || echo "nccl ${NCCL_HOME:-wheel} cuda $("$CUDA_HOME/bin/nvcc" --version | tail -n 1) $CUDA_ARCHS"
}

# The mark comes first and stays: an environment whose making was interrupted is ours, too.
make_environment() {
    mkdir -p "$VENV"
    printf '%s' "$VENV" > "$VENV/.hvdvars-made"
    find "$VENV/" -mindepth 1 -maxdepth 1 ! -name .hvdvars-made -exec rm -rf {} +
    "$PYTHON" -m venv "$VENV"
    printf '%s' "$environment_key" > "$VENV/.hvdvars-environment"
}

# A killed pip leaves packages that it would take for installed: INSTALLER is among the last files it writes.
drop_half_installed() {
    local folder
    for folder in "$VENV"/lib/python*/site-packages/*.dist-info; do
        [ -e "$folder/INSTALLER" ] || rm -rf "$folder"
    done
}
