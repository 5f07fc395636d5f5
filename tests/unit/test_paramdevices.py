import itertools

import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdvars.paramdevices import GreedyLoadBalancingStrategy, ParamServerDeviceSetter, byte_size_load_fn

PS = ["/device:GPU:0", "/device:GPU:1", "/device:GPU:2"]
WORKER = "/device:CPU:0"
resource_or_not = pytest.mark.parametrize("resource", [True, False])
slow = settings(max_examples=40, deadline=None)


def variable(name, shape, resource, dtype=tf.float32):
    return tf.compat.v1.get_variable(
        name, shape, dtype, use_resource=resource, initializer=tf.compat.v1.zeros_initializer()
    )


@pytest.fixture(autouse=True)
def graph():
    with tf.Graph().as_default() as made:
        yield made


@resource_or_not
def test_variables_go_to_the_least_loaded_and_other_ops_to_the_worker(resource):
    setter = ParamServerDeviceSetter(WORKER, PS[:2])
    with tf.compat.v1.device(setter):
        made = [variable(f"v{i}", shape, resource) for i, shape in enumerate([[3], [2], [2], [], [4, 2], [1]])]
        total = tf.add_n([tf.reduce_sum(v) for v in made])
    assert [v.device[-1] for v in made] == list("011001")
    assert [v.device in PS for v in made] == [True] * 6
    assert total.device == WORKER and setter.ps_sizes == [12, 5]
    assert setter.ps_devices == PS[:2] and setter.worker_device == WORKER


@slow
@given(st.lists(st.tuples(st.lists(st.integers(0, 5), max_size=3), st.booleans()), max_size=12), st.integers(1, 3))
def test_no_device_is_above_another_by_more_than_one_variable(kinds, count):
    with tf.Graph().as_default():
        setter = ParamServerDeviceSetter(WORKER, PS[:count])
        with tf.compat.v1.device(setter):
            made = [variable(f"v{i}", shape, resource) for i, (shape, resource) in enumerate(kinds)]
        own = {device: [v.shape.num_elements() for v in made if v.device == device] for device in PS[:count]}
    assert sum(map(len, own.values())) == len(kinds)
    assert setter.ps_sizes == [sum(sizes) for sizes in own.values()]
    for low, high in itertools.permutations(own.values(), 2):
        assert sum(high[:-1]) <= sum(low)


@resource_or_not
def test_variables_on_another_device_are_read_and_trained(resource):
    with tf.compat.v1.device(ParamServerDeviceSetter(WORKER, ["/device:CPU:1"])):
        made = variable("v", [2], resource)
        optimizer = tf.compat.v1.train.MomentumOptimizer(0.5, 0.9)
        train = optimizer.minimize(tf.reduce_sum(made * [1.0, 2.0]))
        read, rows = made.read_value(), tf.gather(made, [1])
        first = tf.compat.v1.global_variables_initializer()
    assert made.device == optimizer.get_slot(made, "momentum").device == "/device:CPU:1" and read.device == WORKER
    with tf.compat.v1.Session(config=tf.compat.v1.ConfigProto(device_count={"CPU": 2})) as session:
        session.run(first)
        session.run(train)
        values = session.run([read, rows])
    assert values[0].tolist() == [-0.5, -1] and values[1].tolist() == [-1]


def test_a_device_given_before_is_kept():
    setter = ParamServerDeviceSetter(WORKER, PS)
    with tf.compat.v1.device(setter), tf.device("/device:GPU:7"):
        made = variable("v", [5], True)
        one = tf.constant(1.0)
    assert made.device == one.device == "/device:GPU:7" and setter.ps_sizes == [0, 0, 0]


@resource_or_not
def test_a_variable_of_unknown_shape_adds_no_load(resource):
    setter = ParamServerDeviceSetter(WORKER, PS[:2])
    with tf.compat.v1.device(setter):
        made = tf.compat.v1.Variable(
            tf.compat.v1.placeholder(tf.float32, [None]), validate_shape=False, use_resource=resource
        )
        after = variable("after", [3], resource)
    assert made.device == after.device == PS[0] and setter.ps_sizes == [3, 0]


@resource_or_not
@pytest.mark.parametrize(
    ("shape", "dtype", "size"), [([], tf.float32, 4), ([3, 2], tf.float16, 12), ([0, 2], tf.int64, 0)]
)
def test_bytes_of_variables(shape, dtype, size, resource):
    made = variable("v", shape, resource, dtype)
    assert byte_size_load_fn(made.op if not resource else made.handle.op) == size


def test_bytes_of_other_ops():
    assert byte_size_load_fn(tf.zeros([2, 3], tf.float64).op) == 48
    with pytest.raises(ValueError, match="byte_size_load_fn: split.* has 2 outputs, expected one"):
        byte_size_load_fn(tf.split(tf.zeros([4]), 2)[0].op)
    for shape in (None, [None]):
        with pytest.raises(ValueError, match="byte_size_load_fn: .*Placeholder.*not fully known"):
            byte_size_load_fn(tf.compat.v1.placeholder(tf.float32, shape).op)


@given(st.lists(st.integers(0, 50), max_size=30), st.integers(1, 6))
def test_the_strategy_is_greedy(loads, tasks):
    strategy = GreedyLoadBalancingStrategy(tasks, lambda op: op)
    sums = [0] * tasks
    for load in loads:
        task = strategy(load)
        assert type(task) is int and task == sums.index(min(sums))
        sums[task] += load


@resource_or_not
def test_the_strategy_places_variables_on_tasks(resource):
    strategy = GreedyLoadBalancingStrategy(2, byte_size_load_fn)
    setter = tf.compat.v1.train.replica_device_setter(ps_tasks=2, ps_strategy=strategy, worker_device="/job:worker")
    with tf.compat.v1.device(setter):
        made = [variable(f"v{i}", [size], resource) for i, size in enumerate([8, 2, 2, 5])]
    assert [v.device for v in made] == [f"/job:ps/task:{task}" for task in (0, 1, 1, 1)]


def test_wrong_questions_are_refused():
    with pytest.raises(ValueError, match="ParamServerDeviceSetter: expected at least one device"):
        ParamServerDeviceSetter(WORKER, [])
    with pytest.raises(ValueError, match="at least one task, got num_tasks=0"):
        GreedyLoadBalancingStrategy(0, byte_size_load_fn)
