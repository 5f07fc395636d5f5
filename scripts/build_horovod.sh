# shellcheck shell=bash disable=SC2034,SC2153,SC2154
# Sourced by setup.sh: Horovod's wheel, built from its source release for exactly this TensorFlow and MPI.

# Part of the wheel's key: raise it when a change below changes the wheel.
RECIPE=1
GPU_BRIDGE='#include "xla/stream_executor/gpu/gpu_types.h"
#include "xla/stream_executor/stream.h"
namespace stream_executor { namespace gpu {
GpuStreamHandle AsGpuStreamValue(Stream* stream) {
  return static_cast<GpuStreamHandle>(stream->platform_specific_handle().stream);
}
} }'

# In the wheelhouse (no network), else in the cache under the key of all that it was built against.
find_horovod_wheel() {
    local folder
    for folder in "$WHEELHOUSE" "$CACHE/$wheel_key"; do
        [ "$folder" = "$WHEELHOUSE" ] && [ "$fill_wheelhouse" = 1 ] && continue
        [ -n "$folder" ] && find "$folder" -maxdepth 1 -name "horovod-$HOROVOD_VERSION-$python_tag-*.whl" 2>/dev/null | head -n 1 | grep . && return
    done
    return 0
}

# TensorFlow 2.19 and later ship wheels without the headers that Horovod's optional XLA bridge includes, and no longer
# export the one function that its GPU code takes from that library.
patch_horovod() {
    local bridge=$1/horovod/tensorflow/xla_mpi_ops.cc
    case $TF_VERSION in
        2.15.* | 2.16.* | 2.17.* | 2.18.*) return ;;
    esac
    if [ "$NCCL" = 1 ]; then
        printf '%s\n' "$GPU_BRIDGE" > "$bridge"
    else
        : > "$bridge"
    fi
}

# TensorFlow's NCCL wheel has libnccl.so.2 only; the linker looks for libnccl.so.
link_nccl() {
    [ -n "${NCCL_HOME:-}" ] && return
    NCCL_HOME=$("$venv_bin/python" -c 'import nvidia.nccl, os; print(os.path.dirname(list(nvidia.nccl.__path__)[0] + "/"))')
    ln -sf libnccl.so.2 "$NCCL_HOME/lib/libnccl.so"
}

build_horovod() (
    set -e
    work=$(mktemp -d "${TMPDIR:-/tmp}/hvdvars-horovod.XXXXXX")
    trap 'rm -rf "$work"' EXIT
    pip_install "cmake>=3.31,<4" cloudpickle psutil pyyaml cffi
    "$venv_bin/python" -m pip download --no-deps --no-binary horovod --no-build-isolation --no-cache-dir -d "$work" "horovod==$HOROVOD_VERSION"
    tar -xzf "$work/horovod-$HOROVOD_VERSION.tar.gz" -C "$work"
    patch_horovod "$work/horovod-$HOROVOD_VERSION"
    export HOROVOD_WITH_TENSORFLOW=1 HOROVOD_WITHOUT_PYTORCH=1 HOROVOD_WITHOUT_MXNET=1 HOROVOD_WITH_MPI=1 HOROVOD_WITH_GLOO=1
    if [ "$NCCL" = 1 ]; then
        link_nccl
        export HOROVOD_GPU_OPERATIONS=NCCL HOROVOD_NCCL_LINK=SHARED HOROVOD_CUDA_HOME=$CUDA_HOME HOROVOD_NCCL_HOME=$NCCL_HOME
        export HOROVOD_BUILD_CUDA_CC_LIST=$CUDA_ARCHS
    fi
    # The wheel outlives this environment: find the MPI wheel's libraries relative to the extension, not by today's path.
    [ "$MPI" = site ] || export LDFLAGS="${LDFLAGS:-} -Wl,--disable-new-dtags,-rpath,\\\$ORIGIN/../../../.."
    "$venv_bin/python" -m pip wheel --no-deps --no-build-isolation --no-cache-dir -w "$work/wheel" "$work/horovod-$HOROVOD_VERSION"
    mkdir -p "$CACHE/$wheel_key"
    printf '%s\n' "$environment_key" > "$CACHE/$wheel_key/environment.txt"
    # Renamed into place, so that an interrupted copy is never taken for a wheel.
    for built in "$work"/wheel/horovod-*.whl; do
        partial=$(mktemp "$CACHE/$wheel_key/.partial.XXXXXX")
        trap 'rm -rf "$work" "$partial"' EXIT
        cp "$built" "$partial"
        chmod 644 "$partial"
        mv "$partial" "$CACHE/$wheel_key/$(basename "$built")"
    done
)

load_horovod() {
    "$venv_bin/python" -c '
import horovod.tensorflow as hvd
assert hvd.gloo_built() and hvd.mpi_built(), "Horovod was built without MPI or Gloo"
import mpi4py
mpi4py.rc.initialize = False  # no launcher here, loading is the test
from mpi4py import MPI
assert MPI.Get_library_version()'
}

fill_wheels() {
    mkdir -p "$WHEELHOUSE"
    # What was compiled for another environment goes first; the description comes last.
    rm -f "$WHEELHOUSE/environment.txt" "$WHEELHOUSE"/horovod-*.whl
    "$venv_bin/python" -m pip download --disable-pip-version-check --prefer-binary -d "$WHEELHOUSE" \
        "${build_packages[@]}" "$tf_package" "${mpi_packages[@]}" "$wheel" '.[train,test]'
    "$venv_bin/python" -m pip download --disable-pip-version-check --no-deps -d "$WHEELHOUSE" "tf_keras==${TF_VERSION%.*}.*"
    printf '%s' "$environment_key" > "$WHEELHOUSE/environment.txt"
}
