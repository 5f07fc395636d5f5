"""What checkpoints refuse: other variables, other optimizers, wrong arguments, files that are none."""

import json
import os
import pickle

import keras
import numpy as np
import pytest
import tensorflow as tf
from checkpoint_tools import K3, MANAGERS, make_variables, refused, saved, train, use_world

import hvdvars as hv
from hvdvars import session, snapshot


@pytest.fixture(autouse=True)
def one_rank():
    use_world()
    yield
    session.stop()


def test_other_variables_are_refused(tmp_path):
    path, variables, *_ = saved(tmp_path)
    refused(ValueError, "3 variables in the file, 2 here", path, variables=make_variables()[:2])
    swapped = [variables[1], variables[0], variables[2]]
    refused(ValueError, r"variables\[0\] is w0 \(3, 2\) float32 in the file and w1 \(5,\)", path, variables=swapped)
    renamed = [keras.Variable(v.value, name=f"u{i}") for i, v in enumerate(variables)]
    refused(ValueError, r"w0 .* in the file and u0", path, variables=renamed)
    wider = [keras.Variable(np.float64(v.value), dtype="float64", name=v.name) for v in variables]
    refused(ValueError, "float32 in the file and w0 .*float64 here", path, variables=wider)


def test_other_optimizers_are_refused(tmp_path):
    path, variables, *_ = saved(tmp_path)
    refused(ValueError, "the optimizer Adam, not of SGD", path, optimizer=K3.SGD())
    refused(ValueError, "the optimizer Adam, not of callable", path, optimizer=lambda grads, variables: None)
    refused(TypeError, "optimizer must be", path, optimizer="adam")
    refused(ValueError, r"keeps the slots .*velocity_hats.*checkpoint has", path, optimizer=K3.Adam(amsgrad=True))
    bare = hv.checkpoint.save(tmp_path / "bare", hv.create("horovod"), variables=variables)
    refused(ValueError, "saved without an optimizer", bare, optimizer=K3.Adam())
    new, fresh, mgr = K3.Adam(), make_variables(), MANAGERS["elements"]()
    unused = hv.checkpoint.save(tmp_path / "unused", mgr, variables=fresh, optimizer=new)
    hv.checkpoint.restore(unused, mgr, variables=fresh, optimizer=new)
    train(mgr, new, fresh, 0, 1)
    refused(ValueError, r"the checkpoint has \[\]", unused, mgr, variables=fresh, optimizer=new)


def test_slots_that_do_not_fit_are_refused_at_the_first_step_with_owners(tmp_path):
    path, *_ = saved(tmp_path)
    for mode in ("elements", "variables"):
        optimizer, variables, mgr = K3.Adam(amsgrad=True), make_variables(), MANAGERS[mode]()
        hv.checkpoint.restore(path, mgr, variables=variables, optimizer=optimizer)
        with pytest.raises(ValueError, match="velocity_hats.*Create the optimizer with the arguments"):
            train(mgr, optimizer, variables, 0, 1)


def test_wrong_arguments(tmp_path):
    variables, mgr = make_variables(), hv.create("horovod")
    calls = [
        (ValueError, r"checkpoint\.save: give model= or variables=", {}),
        (TypeError, r"variables must be a list", {"variables": variables[0]}),
        (TypeError, r"variables\[0\] must be a variable", {"variables": [1.0]}),
        (TypeError, "extra must be a dict", {"variables": variables, "extra": [1]}),
        (TypeError, "not JSON serializable", {"variables": variables, "extra": {"x": np.float32(1)}}),
        (TypeError, "model must be a Keras model", {"model": 3}),
        (ValueError, "no weights yet", {"model": keras.Sequential([keras.layers.Dense(3)])}),
        (TypeError, "no number; it cannot be saved", {"variables": [tf.Variable("text")]}),
    ]
    for kind, match, arguments in calls:
        with pytest.raises(kind, match=match):
            hv.checkpoint.save(tmp_path / "x", mgr, **arguments)
    with pytest.raises(TypeError, match="what hvdvars.create gave, got Adam"):
        hv.checkpoint.save(tmp_path / "x", K3.Adam(), variables=variables)
    with pytest.raises(RuntimeError, match="outside of tf.function"):
        tf.function(lambda: hv.checkpoint.save(tmp_path / "x", mgr, variables=variables), autograph=False)()
    assert list(tmp_path.iterdir()) == []
    session.stop()
    with pytest.raises(RuntimeError, match=r"hvdvars.checkpoint.save was called before hvdvars.init"):
        hv.checkpoint.save(tmp_path / "x", mgr, variables=variables)


def test_all_that_the_optimizer_trains_and_keeps_is_asked_for(tmp_path):
    _, variables, optimizer, mgr = saved(tmp_path)
    with pytest.raises(ValueError, match=r"Adam trains w2 \(and 0 more\), which is neither"):
        hv.checkpoint.save(tmp_path / "x", mgr, variables=variables[:2], optimizer=optimizer)
    two, few = K3.Adam(0.1), make_variables()[:2]
    path = hv.checkpoint.save(tmp_path / "two", mgr, variables=few, optimizer=two)
    refused(ValueError, "Adam trains w2", path, mgr, variables=variables[:2], optimizer=optimizer)
    other = K3.Adam()
    other.build(variables)
    with pytest.raises(ValueError, match="keeps adam.*w2_momentum, .*belong to none of the variables"):
        hv.checkpoint.save(tmp_path / "x", mgr, variables=variables[:2], optimizer=other)

    class Counting:
        def __init__(self):
            self.variables = [tf.Variable(3, name="calls")]

        def __call__(self, grads, variables):
            self.variables[0].assign_add(1)

    counting = Counting()
    with pytest.raises(ValueError, match="keeps calls, .*to variables="):
        hv.checkpoint.save(tmp_path / "x", mgr, variables=variables, optimizer=counting)
    together = [*variables, *counting.variables]
    path = hv.checkpoint.save(tmp_path / "x", mgr, variables=together, optimizer=counting)
    counting.variables[0].assign(0)
    hv.checkpoint.restore(path, mgr, variables=together, optimizer=counting)
    assert int(counting.variables[0]) == 3


def test_files_that_are_none(tmp_path):
    refused(FileNotFoundError, "there is no file .*none.npz on rank 0", tmp_path / "none")
    (tmp_path / "folder.npz").mkdir()
    refused(OSError, "folder.npz", tmp_path / "folder")
    np.savez(tmp_path / "foreign.npz", a=np.zeros(3))
    refused(ValueError, "has no 'meta'", tmp_path / "foreign")
    np.savez(tmp_path / "other.npz", meta=np.array("[1]"))
    refused(ValueError, "not in the format", tmp_path / "other")
    np.save(tmp_path / "array.npz", np.zeros(3))
    refused(ValueError, "array.npz", tmp_path / "array.npz.npy")
    (tmp_path / "pickle.npz").write_bytes(pickle.dumps({"meta": 1}))
    refused(ValueError, "damaged or no checkpoint", tmp_path / "pickle")
    (tmp_path / "empty.npz").write_bytes(b"")
    refused(ValueError, "damaged or no checkpoint", tmp_path / "empty")
    np.savez(tmp_path / "newer.npz", meta=np.array(json.dumps({"format": "hvdvars", "version": 2})))
    refused(ValueError, "has version 2; this hvdvars reads up to 1", tmp_path / "newer")


def test_a_damaged_file_is_refused_or_the_same(tmp_path):
    path, variables, *_ = saved(tmp_path)
    _, sound = snapshot.read(path)
    whole = path.read_bytes()
    for length in range(0, len(whole), 37):
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match="damaged or no checkpoint"):
            snapshot.read(path)
    noticed = 0
    for place in range(0, len(whole), 11):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x10]) + whole[place + 1 :])
        try:
            _, arrays = snapshot.read(path)
        except ValueError:
            noticed += 1
            continue
        assert arrays.keys() == sound.keys() and all(np.array_equal(arrays[key], sound[key]) for key in sound)
    assert noticed > len(whole) / 11 / 2


def test_a_file_is_whole_or_absent(tmp_path, monkeypatch):
    path, variables, *_ = saved(tmp_path)
    before = path.read_bytes()

    def full(file, **arrays):
        file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez", full)
    for name in ("file", "new"):
        with pytest.raises(OSError, match="checkpoint.save: .*No space left"):
            hv.checkpoint.save(tmp_path / name, hv.create("horovod"), variables=variables)
    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["file.npz"]


def test_folders_are_made_links_kept_and_permissions_usual(tmp_path):
    path = snapshot.file_path(tmp_path / "a" / "b" / "c")
    snapshot.write(path, {"variables": [], "optimizer": None}, {})
    assert path.name == "c.npz" and path.exists()
    (tmp_path / "plain").write_text("")
    assert path.stat().st_mode == (tmp_path / "plain").stat().st_mode
    link = tmp_path / "link.npz"
    link.symlink_to(path)
    snapshot.write(link, {"variables": [], "optimizer": None, "n": 2}, {})
    assert link.is_symlink() and snapshot.read(path)[0]["n"] == 2
    assert snapshot.file_path("x") == snapshot.file_path("x.npz") and str(snapshot.file_path("x.y")) == "x.y"
    assert os.fspath(snapshot.file_path(tmp_path)) == f"{tmp_path}.npz"
