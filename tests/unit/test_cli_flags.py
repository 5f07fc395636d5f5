"""Flags of the command: what is accepted, what is refused and how, and that TensorFlow is not needed for it."""

import json
import subprocess
import sys
import textwrap

import pytest

from hvdvars import options
from hvdvars.cli import errors, flags, main, names
from hvdvars.cli.errors import UsageError

LAUNCHER_VARIABLES = ("HOROVOD_", "OMPI_", "PMI_", "PMIX_", "SLURM_", "MPI_LOCAL")


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    import os

    for name in list(os.environ):
        if name.startswith(LAUNCHER_VARIABLES):
            monkeypatch.delenv(name)
    monkeypatch.setattr(errors, "_LINGER_SECONDS", 0.0)


def launched_as(monkeypatch, rank, size=2):
    for name, value in {"RANK": rank, "SIZE": size, "LOCAL_RANK": rank, "LOCAL_SIZE": size}.items():
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", str(value))


def parse(*argv):
    return flags.parse(["train", *argv])


def test_defaults():
    given = parse()
    assert (given.data, given.model, given.variable_update) == ("digits", "cnn", "parameter_server")
    assert given.options == {}
    assert given.batch_size == 32
    assert given.train_dir is None


def test_every_option_of_one_tower_per_rank_has_a_flag_that_takes_its_type():
    texts = {bool: "true", int: "3", float: "2.5"}
    top, _ = flags._parsers()
    for name, rule in options.RULES.items():
        if name in ("hierarchical_copy", "local_towers"):
            continue
        text = texts.get(rule.kind, rule.choices[-1] if rule.choices else "xring")
        value = vars(top.parse_args(["train", f"--{name}={text}"]))[name]
        assert type(value) is rule.kind, name


def test_only_options_that_were_given_are_passed_on():
    given = parse("--variable_update", "horovod", "--average=false", "--fusion", "pack", "--gradient_clip", "1.5")
    assert given.options == {"average": False, "fusion": "pack", "gradient_clip": 1.5}


def test_bool_flag_without_value_is_true():
    assert parse("--variable_update=horovod", "--compact_gradient_transfer").options == {
        "compact_gradient_transfer": True
    }


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (["--batch-size", "4"], ["--batch-size", "--batch_size"]),
        (["--variable_update", "hovod"], ["hovod", "did you mean 'horovod'"]),
        (["--variable_update", "horovod", "--staged_vars"], ["horovod", "staged_vars"]),
        (["--variable_update", "replicated", "--all_reduce_spec", "ring"], ["all_reduce_spec", "'ring'"]),
        (["--variable_update", "horovod", "--fusion=pack", "--gradient_repacking=2"], ["contradict", "fusion"]),
        (["--hierarchical_copy"], ["--hierarchical_copy", "one tower per rank"]),
        (["--local_towers=2"], ["--local_towers", "one tower per rank"]),
        (["--fp16_loss_scale", "8"], ["fp16_loss_scale", "use_fp16"]),
        (["--placement", "element"], ["placement", "'elements'"]),
        (["--model", "Resnet5"], ["Resnet5", "ResNet50", "cnn"]),
        (["--model", "nowhere.py:build"], ["nowhere.py", "No such file"]),
        (["--model", "nowhere.py"], ["file.py:function"]),
        (["--optimizer", "adm"], ["adm", "did you mean 'adam'"]),
        (["--optimizer", "lamb", "--placement", "elements"], ["Lamb", "--placement variables"]),
        (["--batch_size", "0"], ["--batch_size", "positive integer", "'0'"]),
        (["--epochs", "two"], ["--epochs", "positive integer"]),
        (["--learning_rate", "nan"], ["--learning_rate", "positive number"]),
        (["--seed", "-1"], ["--seed"]),
        (["--average", "perhaps"], ["--average", "true or false"]),
        (["--verify_every", "x"], ["--verify_every", "int"]),
        (["stray"], ["stray"]),
    ],
)
def test_refused(argv, parts):
    with pytest.raises(UsageError) as caught:
        parse(*argv)
    for part in parts:
        assert part in str(caught.value)


def test_no_and_unknown_command():
    with pytest.raises(UsageError, match="command is missing"):
        flags.parse([])
    with pytest.raises(UsageError, match="'sing'"):
        flags.parse(["sing"])


def test_names_in_any_case():
    given = parse("--model", "resnet50", "--optimizer", "ADAMAX")
    assert (given.model, given.optimizer) == ("ResNet50", "Adamax")
    assert parse("--optimizer", "AdamW").optimizer == "adamw"


def test_keras_lists_are_read_from_source():
    assert {"ResNet50", "MobileNetV2"} <= set(names.exported("applications"))
    assert {"Adam", "SGD"} <= set(names.exported("optimizers"))
    assert "Optimizer" not in names.exported("optimizers")


def test_model_function(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("from os import path as imported\ndef build(): ...\nalias = build\n")
    for function in ("build", "alias", "imported"):
        assert parse("--model", f"{file}:{function}").model == f"{file}:{function}"
    with pytest.raises(UsageError, match="no function 'other' in .*it has build"):
        parse("--model", f"{file}:other")
    file.write_text("def build(:\n")
    with pytest.raises(UsageError, match="not valid Python"):
        parse("--model", f"{file}:build")


def test_rank_0_says_why_and_all_ranks_give_2(monkeypatch, capsys):
    for rank in (0, 1):
        launched_as(monkeypatch, rank)
        assert main(["train", "--nonsense"]) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.count("\n") == (1 if rank == 0 else 0)


def test_help_comes_from_rank_0_only(monkeypatch, capsys):
    for rank in (0, 1):
        launched_as(monkeypatch, rank)
        assert main(["train", "--help"]) == 0
        assert ("--variable_update" in capsys.readouterr().out) is (rank == 0)


def test_a_file_is_missed_once_per_node(monkeypatch, capsys):
    launched_as(monkeypatch, 3, size=4)
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_RANK", "1")
    assert main(["train", "--data", "nowhere.npz"]) == 2
    assert capsys.readouterr().err == ""
    launched_as(monkeypatch, 2, size=4)
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_RANK", "0")
    assert main(["train", "--data", "nowhere.npz"]) == 2
    assert "rank 2 on" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["file", "below a file"])
def test_train_dir_that_cannot_be(tmp_path, capsys, kind):
    (tmp_path / "taken").write_text("")
    folder = tmp_path / "taken" if kind == "file" else tmp_path / "taken" / "run"
    assert main(["train", "--train_dir", str(folder)]) == 2
    assert str(folder) in capsys.readouterr().err


def test_nothing_heavy_is_loaded_to_refuse(tmp_path):
    """In a fresh process, for each kind of mistake."""
    mistakes = [
        ["--nonsense"],
        ["--variable_update", "hovod"],
        ["--variable_update", "horovod", "--staged_vars"],
        ["--model", "Resnet5"],
        ["--optimizer", "adm"],
        ["--data", str(tmp_path / "nowhere.npz")],
        ["--train_dir", __file__],
    ]
    program = textwrap.dedent(
        """
        import json, sys
        from hvdvars.cli import main
        codes = [main(["train", *argv]) for argv in json.loads(sys.argv[1])]
        heavy = [name for name in ("tensorflow", "keras", "horovod", "mpi4py") if name in sys.modules]
        print(json.dumps([codes, heavy]))
        """
    )
    done = subprocess.run(
        [sys.executable, "-c", program, json.dumps(mistakes)], capture_output=True, text=True, timeout=120, check=True
    )
    assert json.loads(done.stdout) == [[2] * len(mistakes), []]
    assert len(done.stderr.splitlines()) == len(mistakes)
