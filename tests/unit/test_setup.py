"""scripts/setup.sh: what it refuses before it creates anything, and its course with a pip that only writes down."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOOLS = """
basename bash cat chmod cp cut diff dirname env find grep gzip head make mkdir mktemp mv realpath rm sha256sum tail tar
touch uname
"""


def script(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n" + text + "\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def site(tmp_path):
    return Site(tmp_path)


class Site:
    """A machine with a compiler and Python, without MPI, and with an empty home."""

    def __init__(self, folder):
        self.folder, self.bin, self.home = folder, folder / "bin", folder / "home"
        self.venv = self.home / "venv"
        self.home.mkdir()
        self.bin.mkdir()
        for tool in TOOLS.split():
            if found := shutil.which(tool):
                (self.bin / tool).symlink_to(found)
        script(self.bin / "c++", f'exec {shutil.which("c++")} "$@"')
        script(self.bin / "python3", f'exec {sys.executable} "$@"')

    def environment(self, **variables):
        home = str(self.home)
        own = {"HOME": home, "XDG_CACHE_HOME": home, "TMPDIR": home, "VENV": str(self.venv), "PIP_NO_INDEX": "1"}
        return {"PATH": str(self.bin), **own, **{name: str(value) for name, value in variables.items()}}

    def shell(self, code, **variables):
        """Runs code with the checks of setup.sh at hand."""
        code = f"set -euo pipefail\ncd {ROOT}\n. scripts/setup_checks.sh\n. scripts/build_horovod.sh\n{code}"
        return self.run("-c", code, **variables)

    def run(self, *command, **variables):
        environment = self.environment(**variables)
        command = [self.bin / "bash", *command]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)

    def refuses(self, *words, **variables):
        before = sorted(self.home.rglob("*"))
        run = self.run(ROOT / "scripts/setup.sh", **variables)
        assert run.returncode == 2, run.stdout + run.stderr
        for word in words:
            assert word in run.stdout + run.stderr
        assert "==> Creating" not in run.stdout
        assert sorted(self.home.rglob("*")) == before


def test_an_unknown_tensorflow(site):
    site.refuses("TF_VERSION=1.15.0 is not known", "2.21.0", TF_VERSION="1.15.0")


@pytest.mark.parametrize("minor", [9, 13])
def test_a_python_without_a_wheel(site, minor):
    stub = script(site.bin / "stub", f'[ "$1" = -c ] && echo {minor} || echo Python 3.{minor}.1')
    site.refuses(f"no tested wheel for Python 3.{minor}.1", "Python 3.10 to 3.12", PYTHON=stub)


def test_a_python_that_is_missing_or_does_not_run(site):
    site.refuses("No 'python3.99' on PATH", PYTHON="python3.99")
    site.refuses("does not run", PYTHON=script(site.bin / "broken", "exit 127"))


def test_no_compiler(site):
    (site.bin / "c++").unlink()
    site.refuses("No C++ compiler", "apt-get install g++")


def test_a_compiler_too_old(site):
    script(site.bin / "c++", "exit 1")
    site.refuses("does not compile C++17")


def test_nccl_without_nvcc(site):
    site.refuses("nvcc is missing", NCCL=1, CUDA_HOME=site.folder / "cuda")


def test_site_mpi_without_mpicxx(site):
    site.refuses("MPI=site, but there is no mpicxx", MPI="site")
    site.refuses("MPI=intel is neither", MPI="intel")


def test_mpicxx_of_an_environment_is_not_the_sites(site):
    other = site.folder / "other"
    script(other / "bin/mpicxx", "exit 0")
    (other / ".hvdvars-made").touch()
    site.refuses("there is no mpicxx", MPI="site", PATH=f"{other}/bin:{site.bin}")


def test_a_foreign_environment(site):
    site.venv.mkdir()
    (site.venv / "precious").touch()
    site.refuses("was not made by this script", "Name another place")


def test_a_python_inside_the_environment(site):
    (site.venv / "bin").mkdir(parents=True)
    (site.venv / ".hvdvars-made").touch()
    (site.venv / "bin/python3").symlink_to(sys.executable)
    site.refuses("which is made from it", PYTHON=site.venv / "bin/python3")


def test_wheels_of_another_environment_that_cannot_be_replaced(site):
    site.home.joinpath("file").write_text("")
    site.refuses("cannot be written", WHEELHOUSE=site.home / "file/wheels")


def test_the_difference_between_two_environments_is_shown(site):
    wheels = site.home / "wheels"
    wheels.mkdir()
    (wheels / "environment.txt").write_text("tensorflow-cpu==2.18.1\ncp311")
    code = 'environment_key=$WANTED; check_wheelhouse; echo "fill $fill_wheelhouse"'
    run = site.shell("fill_wheelhouse=0; " + code, WANTED="tensorflow-cpu==2.21.0\ncp311", WHEELHOUSE=wheels)
    assert "< tensorflow-cpu==2.18.1\n> tensorflow-cpu==2.21.0\nfill 1" in run.stdout, run.stderr
    assert "cp311" not in run.stdout
    run = site.shell("fill_wheelhouse=0; " + code, WANTED="tensorflow-cpu==2.18.1\ncp311", WHEELHOUSE=wheels)
    assert run.stdout == "fill 0\n"


@pytest.mark.parametrize(
    ("version", "chosen"),
    [("mpirun (Open MPI) 4.1.4", "site"), ("mpirun (Open MPI) 5.0.3", "pypi"), ("HYDRA build details:", "pypi")],
)
def test_the_sites_mpi_is_taken_where_it_is_open_mpi_4(site, version, chosen):
    script(site.bin / "mpicxx", "exit 0")
    script(site.bin / "mpirun", f"echo '{version}'")
    run = site.shell('choose_mpi; echo "$MPI"')
    assert run.stdout.splitlines()[-1] == chosen
    assert (version in run.stdout) == (chosen == "pypi")
    run = site.shell('choose_mpi; echo "$MPI"', MPI="site")
    assert run.stdout.splitlines()[-1] == "site"
    assert ("Warning" in run.stdout) == (chosen == "pypi")


def test_a_failure_inside_a_step_ends_it(site):
    run = site.shell("log=$TMPDIR/log; work() { false; echo went on; }; step Title 'a hint' work; echo after")
    assert run.returncode == 1
    assert "after" not in run.stdout
    assert "went on" not in run.stderr
    assert "a hint" in run.stderr


def test_the_active_environment_leaves_path(site):
    code = 'path_without_environments "$VENV"'
    run = site.shell(code, PATH=f"{site.venv}/bin:{site.bin}:{site.venv}/../venv/bin:/usr/bin")
    assert run.stdout == f"{site.bin}:/usr/bin"


def test_making_an_environment_marks_it_first(site):
    stub = script(site.bin / "stub", "exit 1")
    code = "PYTHON=$STUB; environment_key=key; log=$TMPDIR/log; step Title hint make_environment"
    assert site.shell(code, STUB=stub).returncode == 1
    assert [path.name for path in site.venv.iterdir()] == [".hvdvars-made"]
    assert (site.venv / ".hvdvars-made").read_text() == str(site.venv)


def test_make_clean_leaves_foreign_environments(site):
    def clean():
        command = ["make", "-C", site.home, "-f", ROOT / "Makefile", "clean"]
        environment = {**os.environ, "VENV": str(site.venv)}
        subprocess.run(command, env=environment, check=True, capture_output=True, timeout=60)

    site.venv.mkdir()
    clean()
    assert site.venv.exists()
    (site.venv / ".hvdvars-made").touch()
    clean()
    assert not site.venv.exists()


# Stands for the environment's python: writes down its calls, fails on what the file "fail" names.
RECORDER = r"""
echo "$*" >> "$HOME/calls"
! grep -qF -- "$(cat "$HOME/fail" 2>/dev/null || echo nothing)" <<END || exit 1
$*
END
while [ $# -gt 1 ]; do case $1 in -d | -w) folder=$2 ;; esac; last=$2; shift; done
case $last in
    horovod==*) mkdir -p "$folder/horovod-0.28.1/horovod/tensorflow"
        tar -czf "$folder/horovod-0.28.1.tar.gz" -C "$folder" horovod-0.28.1 ;;
    */horovod-0.28.1) mkdir "$folder"; touch "$folder/horovod-0.28.1-$TAG-$TAG-any.whl" ;;
    .*test]) touch "$(dirname "$0")/hvdvars"; chmod 755 "$(dirname "$0")/hvdvars" ;;
esac"""


class TestCourse:
    @pytest.fixture
    def course(self, site):
        recorder = script(site.bin / "recorder", RECORDER)
        make = f'mkdir -p "$3/bin"; cp {recorder} "$3/bin/python"; exit'
        script(site.bin / "python3", f'[ "$1 $2" != "-m venv" ] || {{ {make}; }}\nexec {sys.executable} "$@"')
        tag = f"cp{sys.version_info[0]}{sys.version_info[1]}"

        def run(fail="nothing", code=0, **variables):
            (site.home / "fail").write_text(fail)
            (site.home / "calls").write_text("")
            done = site.run(ROOT / "scripts/setup.sh", TAG=tag, **variables)
            assert done.returncode == code, done.stdout + done.stderr
            return done.stdout, (site.home / "calls").read_text()

        return run

    def test_a_failed_build_is_a_failure_and_the_next_run_goes_on(self, site, course):
        said, calls = course(fail="--no-binary horovod", code=1)
        assert "Building Horovod" in said
        assert "pip wheel" not in calls
        said, calls = course()
        assert "Creating" not in said
        assert "pip wheel" in calls
        assert not list(site.home.rglob(".partial*"))
        said, calls = course(PATH=f"{site.venv}/bin:{site.bin}", VIRTUAL_ENV=site.venv)
        assert "is ready (" in said
        assert not calls

    def test_a_moved_environment_is_made_again(self, site, course):
        course()
        moved = site.home / "moved"
        site.venv.rename(moved)
        said, _ = course(VENV=moved)
        assert "Creating" in said
        assert "Using the Horovod wheel built earlier" in said

    def test_an_interrupted_pip_leaves_nothing_that_counts_as_installed(self, site, course):
        course(fail="test]", code=1)
        packages = site.venv / "lib/python3/site-packages"
        for name in ("half", "whole"):
            (packages / f"{name}-1.dist-info").mkdir(parents=True)
        (packages / "whole-1.dist-info/INSTALLER").touch()
        course()
        assert [path.name for path in packages.iterdir()] == ["whole-1.dist-info"]

    def test_a_wheelhouse_is_filled_beside_a_ready_environment(self, site, course):
        course()
        wheels = site.home / "wheels"
        said, _ = course(WHEELHOUSE=wheels)
        assert "Filling" in said
        key = (wheels / "environment.txt").read_text()
        assert key == (site.venv / ".hvdvars-environment").read_text()
        said, calls = course(WHEELHOUSE=wheels)
        assert "is ready (" in said
        assert not calls
        (wheels / "environment.txt").write_text("another")
        (wheels / "horovod-0.28.1-old.whl").touch()
        course(fail="pip download", code=1, WHEELHOUSE=wheels)
        assert not list(wheels.iterdir())
        course(WHEELHOUSE=wheels)
        assert (wheels / "environment.txt").read_text() == key
        shutil.rmtree(site.venv)
        said, calls = course(WHEELHOUSE=wheels)
        assert f"Using only the wheels in {wheels}" in said
        assert "--no-index" in calls
