"""The runtime by itself, on modules of a few numbers: gradients of several consumers, and errors that say where."""

import re
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

from hetmesh.balance import BatchPlan, plan_batch
from hetmesh.boundary import World, init
from hetmesh.errors import BoundaryError, BoundaryTimeout, SampleError
from hetmesh.graph import BoundarySpec, ModuleGraph, ModuleOptions, ModuleSpec, SampleMeta, Stage, stage_graph
from hetmesh.layout import MeshSpec
from hetmesh.runtime import Runtime
from hetmesh.schedule import sequential
from hetmesh.testing.pool import WorkerPool
from support.assignments import RandomAssignment

WIDTH = 3
ROWS = (2, 0, 1, 3, 1)  # of each sample; one has none


class Source(nn.Module):
    """Rows of the samples, from what its lane loads."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(WIDTH, dtype=torch.float64))

    def forward(self, batch, inputs):
        return batch["rows"] @ self.weight


class Square(nn.Module):
    """Rows in, rows out, with a gradient that depends on the rows."""

    def __init__(self, factor):
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(factor, dtype=torch.float64))

    def forward(self, batch, inputs):
        return self.factor * inputs["source"] ** 2


class Sum(nn.Module):
    """The loss: the sum of all rows, those of `twice` counted double."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, batch, inputs):
        return self.weight * (inputs["thrice"].sum() + 2 * inputs["twice"].sum())


MODULES = {"source": Source, "twice": partial(Square, 2.0), "thrice": partial(Square, 3.0), "sink": Sum}
EDGES = (("source", "twice"), ("source", "thrice"), ("twice", "sink"), ("thrice", "sink"))


def values(i):
    """The rows of sample i."""
    return torch.randn(ROWS[i], WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(i))


def make(world, ranks, modules=MODULES, load=values, policy=plan_batch):
    """This rank's modules, and a function that runs one step. `source` feeds two modules, which feed the LLM."""
    meshes = {name: MeshSpec.make(ranks[name], dp_replicate=len(ranks[name])) for name in MODULES}
    options = ModuleOptions(parameter_dtype=torch.float64)
    specs = [ModuleSpec(name, mesh, features=WIDTH, options=options) for name, mesh in meshes.items()]
    graph = ModuleGraph(tuple(specs), tuple(BoundarySpec(*edge) for edge in EDGES))
    groups = {name: world.group(mesh.ranks) for name, mesh in meshes.items()}
    mine = {name: modules[name]() for name in MODULES if world.rank in meshes[name]}

    def reduce(name):
        for parameter in mine[name].parameters():
            dist.all_reduce(parameter.grad, group=groups[name])
        return lambda: None

    runtime = Runtime(
        world,
        graph,
        {Stage(name): module for name, module in mine.items()},
        reducers={Stage(name): partial(reduce, name) for name in mine},
        losses={"sink": lambda output, batch: output},
    )
    samples = [SampleMeta(f"s{i}", 4, targets=((3, 4),), rows=dict.fromkeys(MODULES, n)) for i, n in enumerate(ROWS)]
    plan = policy(graph, samples, 1)
    schedule = sequential(stage_graph(graph), plan.routes, True)

    def load_batch(stage, m):
        name = stage.module
        if name != "source":
            return {}
        own = [load(i) for i in plan.samples_of(name, m, graph[name].lane_of(world.rank))]
        return {"rows": torch.cat([torch.zeros(0, WIDTH, dtype=torch.float64), *own])}

    return mine, lambda: runtime.run(schedule, plan, load_batch, step=0)


def truth():
    """Loss and gradients of everything at once, by plain autograd."""
    modules = {name: made() for name, made in MODULES.items()}
    rows = modules["source"]({"rows": torch.cat([values(i) for i in range(len(ROWS))])}, {})
    both = {name: modules[name]({}, {"source": rows}) for name in ("twice", "thrice")}
    loss = modules["sink"]({}, both)
    loss.backward()
    return loss.item(), gradients(modules)


def gradients(modules):
    return {f"{n}.{k}": p.grad for n, module in modules.items() for k, p in module.named_parameters()}


def loss_and_gradients(rank, ranks, policy=plan_batch):
    mine, step = make(World.current(), ranks, policy=policy)
    return step()["sink"].item(), gradients(mine)


LAYOUTS = {
    "a rank each": {"source": [0], "twice": [1], "thrice": [2], "sink": [3]},
    "consumers of different sizes": {"source": [0, 1], "twice": [2], "thrice": [1, 2, 3], "sink": [3]},
    "consumers on the producer": {"source": [0, 1, 2], "twice": [0, 1, 2], "thrice": [2, 1], "sink": [0, 3]},
    "everything everywhere": dict.fromkeys(MODULES, (0, 1, 2, 3)),
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_of_two_consumers_are_summed(pool4, layout):
    """Over several microbatches, of which some have no rows at all."""
    loss, expected = truth()
    ranks = LAYOUTS[layout]
    results = pool4.run(loss_and_gradients, ranks)
    assert sum(part for part, _ in results) == pytest.approx(loss, rel=1e-12)
    for rank, (_, found) in enumerate(results):
        assert {name.split(".")[0] for name in found} == {name for name in MODULES if rank in ranks[name]}
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, expected[name], rtol=1e-12, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_do_not_depend_on_where_samples_are(pool4, layout):
    """Microbatches without rows, or that nobody wants, among them."""
    loss, expected = truth()
    for seed in range(6):
        results = pool4.run(loss_and_gradients, LAYOUTS[layout], RandomAssignment(seed))
        assert sum(part for part, _ in results) == pytest.approx(loss, rel=1e-12)
        for _, found in results:
            for name, gradient in found.items():
                torch.testing.assert_close(gradient, expected[name], rtol=1e-12, atol=1e-12)


@pytest.fixture
def world():
    world = init()
    yield world
    world.close()


class Broken(nn.Module):
    def __init__(self, error):
        super().__init__()
        self.error = error

    def forward(self, batch, inputs):
        raise self.error


ALONE = dict.fromkeys(MODULES, (0,))


@pytest.mark.parametrize("error", [KeyError("x"), RuntimeError("shapes do not match"), SampleError("sample 's3': bad")])
def test_an_error_inside_a_module_carries_the_action(world, error):
    _, step = make(world, ALONE, MODULES | {"thrice": partial(Broken, error)})
    with pytest.raises(type(error)) as caught:
        step()
    assert caught.value is error
    assert error.__notes__ == ["during thrice.0 F0 on rank 0"]


def test_an_error_while_samples_are_loaded_carries_the_action(world):
    def load(i):
        if i == 3:
            raise OSError("no such file")
        return values(i)

    _, step = make(world, ALONE, load=load)
    with pytest.raises(OSError, match="no such file") as caught:
        step()
    assert caught.value.__notes__ == ["during source.0 F3 on rank 0"]


class Wide(nn.Module):
    def forward(self, batch, inputs):
        return torch.zeros(len(inputs["source"]), WIDTH + 1, dtype=torch.float64)


def test_rows_that_are_not_what_was_promised_name_action_and_boundary(world):
    _, step = make(world, ALONE, MODULES | {"twice": Wide})
    says = r"^twice.0->sink.0 SEND0: boundary 'twice->sink', microbatch 0, forward: .* promises .* got \(2, 4\)"
    with pytest.raises(BoundaryError, match=says):
        step()


def apart(graph, samples, size):
    """The modules between go through two samples in another microbatch, and the LLM through all in its second one."""
    whole, two = (((0, 1, 2, 3, 4),),), (((0, 1, 4),), ((2, 3),))
    return BatchPlan(graph, tuple(samples), {"source": whole, "twice": two, "thrice": two, "sink": (((),), *whole)})


def test_rows_along_a_route_that_are_not_what_was_promised_name_both_microbatches(world):
    _, step = make(world, ALONE, MODULES | {"twice": Wide}, policy=apart)
    says = r"^twice.0->sink.0 SEND0>1: boundary 'twice->sink', microbatch 0 to 1, forward: .* promises .* got \(3, 4\)"
    with pytest.raises(BoundaryError, match=says):
        step()


class Long(nn.Module):
    def forward(self, batch, inputs):
        return torch.zeros(9, WIDTH, dtype=torch.float64)


def test_too_many_rows_for_several_routes_are_an_error(world):
    _, step = make(world, ALONE, MODULES | {"source": Long}, policy=apart)
    says = r"^source.0->twice.0 SEND0: microbatch 0: source.0->twice.0 was promised 7 rows on rank 0, got 9$"
    with pytest.raises(BoundaryError, match=says):
        step()


def test_a_timeout_of_a_collective_inside_a_module_names_the_action(world):
    given_up = RuntimeError("[gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 500ms for recv operation")
    _, step = make(world, ALONE, MODULES | {"sink": partial(Broken, given_up)})
    with pytest.raises(BoundaryTimeout, match=r"^sink.0 F0: rank 0 waited 300 s in a collective of the module$"):
        step()


def reduce_alone(rank):
    """Two ranks take a step; in the next one rank 0 reduces gradients that rank 1 never sends."""
    world = World.current()
    _, step = make(world, dict.fromkeys(MODULES, (0, 1)))  # lanes alike: no boundary sends anything
    step()  # connections are made at first use, and wait as long as joining may take
    world.set_timeout(0.5)
    if rank == 0:
        with pytest.raises(BoundaryTimeout) as caught:
            step()
        return str(caught.value)
    return None


@pytest.mark.slow
def test_a_shorter_timeout_holds_for_groups_that_exist():
    """`World.set_timeout` reaches gloo: its own limit would be half an hour."""
    with WorkerPool(2) as pool:  # its own: a timeout poisons gloo
        message, _ = pool.run(reduce_alone)
    assert re.fullmatch(r"\w+\.0 REDUCE: rank 0 waited 0.5 s in a collective of the module", message)
