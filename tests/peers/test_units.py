"""The checkout's own tests pass with our managers, in one process without a launcher, where they pass with its own."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import checkout
import launchers
import pytest
from peers import BARE

pytestmark = checkout.NEEDED

LIMIT = 1500

# By module and class. The others need a GPU or files that are not there, take minutes, or have nothing to do with
# managers.
TESTS = {
    "variable_mgr_util_test:VariableMgrUtilTest": """
        testGetLossScaleUpdateOpTruePath testGetLossScaleUpdateOpFalsePath
        testAppendGradientsWithLossScaleWithAutoScaleDisabled testAppendGradientsWithLossScaleForNonChiefWorker
        testAppendGradientsWithLossScaleWithoutNan testAppendGradientsWithLossScaleWithtNan
    """,
    "allreduce_test:AllReduceTest": """
        testGroupKey testExtractRanges testPackRange testUnpackGradTuple testPackSmallTensors testUnpackSmallTensors
    """,
    "allreduce_test:DynamicPackingTest": """
        testPackUnpack0 testPackUnpack1 testPackUnpack2 testAllReducePacked0 testAllReducePacked1
    """,
    "benchmark_cnn_test:VariableUpdateTest": """
        testDefault testCpuAsLocalParamDevice testFp16 testMomentum testRmsprop testNoLayers testVariousAllReduceSpecs
        testPrintBaseLoss testSingleL2LossOp testResourceVars testEvalDuringTrainingEveryNSteps
    """,
    "benchmark_cnn_test:VariableMgrLocalReplicatedTest": "test_grad_aggregation",
    "benchmark_cnn_test:TfCnnBenchmarksTest": """
        testNoPrintAccuracy testLowAccuracy testParameterServer testParameterServerStaged testReplicated testIndependent
        testForwardOnly testCpuAsLocalParamDevice testNHWC testCpuAsDevice testMomentumParameterServer
        testRmspropReplicated testBatchGroupSize testGradientClip testWeightDecay testNoLayers testSaveModelSteps
        testFp16WithFp32Vars testFp16WithFp16Vars testXlaCompile testGradientRepacking testTraceFileStepStatsProto
        testLoadCheckpoint testGetCheckpointToLoadFullPath testGetCheckpointToLoadException testGetCheckpointToLoad
        testShiftRatio testDistributedReplicatedSavableVars testLearningRateUserProvidedInitLrAndWarmup
        testNumBatchesAndEpochs testEvalDuringTraining testEvalDuringTrainingNumEpochs testEarlyStopping
        testOutOfRangeErrorsAreNotIgnored testInvalidFlags testMakeParams
    """,
    "benchmark_cnn_test:TestTrivialModel": """
        testModel testSaveLoadModel testSendRecvVariables testReplicatedVariables testIndependentVariables
        testStagedVariables testSummaryVerbosity
    """,
}
NAMES = [f"{group}.{name}" for group, names in TESTS.items() for name in names.split()]


def run(copy: Path, folder: Path, names: list[str]) -> tuple[dict[str, str | None], launchers.Ended]:
    """What went wrong in each test, and the launch."""
    folder.mkdir()
    (folder / "tests.txt").write_text("\n".join(names))
    program = [sys.executable, str(Path(__file__).with_name("units.py")), str(copy), str(folder)]
    ended = launchers.run(BARE, program, folder / "output.txt", LIMIT)
    path = folder / "results.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return {row["name"]: row["problem"] for row in rows}, ended


@pytest.fixture(scope="session")
def problems(request, tmp_path_factory, replaced):
    """What went wrong in the selected tests, with our managers."""
    found = [getattr(item, "callspec", None) and item.callspec.params.get("unit") for item in request.session.items]
    return run(replaced, tmp_path_factory.mktemp("units") / "replaced", [name for name in found if name])


@pytest.mark.parametrize("unit", NAMES)
def test_passes_with_our_managers(problems, unit, original, tmp_path):
    found, ended = problems
    if unit in found and found[unit] is None:
        return
    problem = found.get(unit, f"no result; the run ended with {ended.code}\n{ended.tail()}")
    before, _ = run(original, tmp_path / "original", [unit])
    if before.get(unit) is not None:
        pytest.skip(f"it fails with the checkout's own managers too: {before[unit]}")
    pytest.fail(f"{unit}\n{problem}", pytrace=False)
