"""Imports point to a lower layer; TensorFlow, Horovod and MPI are loaded only where they must be."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "hvdvars"

# Lowest first. A file may import from the rows before its own. Folders of the package count as one.
LAYERS = [
    ["types"],
    [
        "check",
        "fusion",
        "sparse",
        "placement",
        "spec",
        "scaling",
        "options",
        "launchenv",
        "optimizer",
        "snapshot",
        "layout",
        "halving",
        "smalltensors",
        "towers",
        "paramdevices",
        "specnames",
        "getters",
        "graphscale",
    ],
    ["session", "wire", "graphs", "collectives"],
    ["algorithms", "hierarchy", "broadcast", "meeting", "guard", "staging", "lossscale", "relay", "slots", "savable"],
    ["reduce", "agreement", "owner", "holding", "masters"],
    ["manager"],
    ["towermgr"],
    ["towermodes", "ownertowers"],
    ["mgr", "owners", "checkpoint", "restoring"],
    ["distribute"],
    ["keras", "batchreduce", "joined", "tf_cnn_benchmarks"],
    ["__init__"],
    ["cli"],
    ["__main__"],
]
# The few imports inside one row: (importer, imported).
BESIDE = {
    ("options", "spec"),
    ("fusion", "check"),
    ("specnames", "spec"),
    ("towers", "scaling"),
    ("towers", "sparse"),
    ("graphscale", "scaling"),
    ("savable", "meeting"),
    ("tf_cnn_benchmarks", "batchreduce"),
    ("tf_cnn_benchmarks", "joined"),
    ("wire", "session"),
    ("collectives", "graphs"),
    ("collectives", "session"),
    ("collectives", "wire"),
    ("guard", "meeting"),
    ("hierarchy", "algorithms"),
    ("hierarchy", "meeting"),
    ("relay", "meeting"),
    ("agreement", "reduce"),
    ("owner", "reduce"),
    ("holding", "owner"),
    ("masters", "owner"),
    ("masters", "holding"),
    ("mgr", "owners"),
    ("checkpoint", "owners"),
    ("checkpoint", "restoring"),
}

FILES = sorted(PACKAGE.rglob("*.py"))
LAYER_OF = {name: number for number, names in enumerate(LAYERS) for name in names}


def unit_of(parts):
    """The row entry of a module given as path parts below the package: its first folder, or its own name."""
    return parts[0] if parts else "__init__"


def imported_modules(source, package):
    """Dotted names of all that `source`, a file of `package`, imports anywhere; `a.b` for `from a import b`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *filter(None, [node.module])])
            yield from (f"{base}.{alias.name}" for alias in node.names)


def own_unit(dotted):
    """The row entry that an import of `hvdvars…` reaches: a submodule, or the package's own names."""
    parts = dotted.split(".")[1:]
    known = {*LAYER_OF, *(path.relative_to(PACKAGE).with_suffix("").parts[0] for path in FILES)}
    return parts[0] if parts and parts[0] in known else "__init__"


def points_down(importer, imported):
    return importer == imported or LAYER_OF[imported] < LAYER_OF[importer] or (importer, imported) in BESIDE


def modules_of(path):
    package = ".".join(path.relative_to(ROOT).parent.parts)
    return set(imported_modules(path.read_text(), package))


def within(dotted, module):
    return dotted == module or dotted.startswith(module + ".")


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_down(path):
    unit = unit_of(path.relative_to(PACKAGE).with_suffix("").parts)
    assert unit in LAYER_OF, f"{path.name} is in no layer: add it to LAYERS in {Path(__file__).name}"
    own = {own_unit(dotted) for dotted in modules_of(path) if within(dotted, "hvdvars")}
    up = sorted(name for name in own if not points_down(unit, name))
    assert not up, f"{path.relative_to(ROOT)} (layer {LAYER_OF[unit]}) imports {up}, which are not below it"


def importers_of(module):
    return {
        str(path.relative_to(PACKAGE)) for path in FILES if any(within(dotted, module) for dotted in modules_of(path))
    }


def test_only_collectives_imports_horovod():
    assert importers_of("horovod") <= {"collectives.py", "launchenv.py"}
    assert importers_of("horovod.tensorflow") <= {"collectives.py"}
    assert importers_of("horovod.runner") <= {"launchenv.py"}
    assert importers_of("horovod.keras") | importers_of("horovod.torch") == set()


@pytest.mark.parametrize("name", ["options", "spec", "placement", "launchenv", "layout", "halving"])
def test_pure_files_name_no_heavy_package(name):
    path = PACKAGE / f"{name}.py"
    if path.exists():
        heavy = [dotted for dotted in modules_of(path) if dotted.split(".")[0] in ("tensorflow", "keras", "mpi4py")]
        assert not heavy, f"{path.relative_to(ROOT)} imports {heavy}"


def test_light_imports_load_nothing_heavy():
    light = [
        name
        for name in ("types", "options", "spec", "placement", "launchenv", "layout", "halving")
        if (PACKAGE / f"{name}.py").exists()
    ]
    code = "import importlib, sys, hvdvars\n" + "".join(
        f"importlib.import_module('hvdvars.{name}')\n" for name in light
    )
    code += "print(sorted({name.split('.')[0] for name in sys.modules} & {'tensorflow', 'keras', 'horovod', 'mpi4py'}))"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_the_reader_sees_every_form_of_import():
    source = (
        "import hvdvars.mgr as m\nfrom hvdvars import spec, init\nfrom . import fusion\nfrom .cli import main\n"
        "def f():\n    import horovod.tensorflow as hvd\n    from horovod.runner.http import http_server\n"
    )
    assert set(imported_modules(source, "hvdvars")) == {
        "hvdvars.mgr",
        "hvdvars.spec",
        "hvdvars.init",
        "hvdvars.fusion",
        "hvdvars.cli.main",
        "horovod.tensorflow",
        "horovod.runner.http.http_server",
    }
    assert set(imported_modules("from .. import reduce\nfrom ..mgr import create", "hvdvars.cli")) == {
        "hvdvars.reduce",
        "hvdvars.mgr.create",
    }
    assert own_unit("hvdvars.spec.parse") == "spec" and own_unit("hvdvars.init") == own_unit("hvdvars") == "__init__"
    assert own_unit("hvdvars.cli.main") == "cli"


def test_the_rule():
    assert points_down("mgr", "reduce") and points_down("cli", "types") and points_down("cli", "cli")
    assert points_down("options", "spec") and not points_down("spec", "options")
    assert not points_down("fusion", "collectives") and not points_down("broadcast", "guard")
    assert not points_down("reduce", "__init__")
