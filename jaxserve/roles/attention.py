"""The attention worker: embedding, attention with its KV cache, router, head and sampler.

It runs the attention stages of every lane's step, sends each layer's message and takes in the
answer. Which lane's stage is next is its runner's decision (`cell.py`). Each hot call takes flat,
committed arguments and stays on JAX's C++ path.
"""

from collections.abc import Generator, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from jaxserve.checkpoint.source import CheckpointNames, Sources
from jaxserve.config.deployment import Deployment
from jaxserve.config.model import LayerKind
from jaxserve.link.dispatch.ends import Arrays, AttentionEnd, ReceiveAnswer, SendMessage
from jaxserve.mesh import ATTENTION_RULES, cached_sharding
from jaxserve.model.blocks import ModelTemplates
from jaxserve.model.module import Template
from jaxserve.roles.attention_programs import AttentionPrograms
from jaxserve.roles.capacity import deployment_buckets
from jaxserve.roles.compilation import Call, Get, ProgramKey, compile_steps, hot_call
from jaxserve.roles.drafting import Drafting, DraftingExecutables, StepEnd, drafting_executables
from jaxserve.roles.layout import Bucket
from jaxserve.roles.program import REPLICATED
from jaxserve.roles.sampling import Sampling, SamplingExecutables, sampling_executables
from jaxserve.roles.step_plan import StepPlan
from jaxserve.roles.token_programs import GroupPut, KVArrays
from jaxserve.roles.weights import HeldBlock, LeafSource, Leaves, load_leaves, load_progress, zeroed
from jaxserve.roles.worker import Stages, layers_of


class AttentionWeights:
    """Embedding, head, and one tuple of leaves a layer, those of prediction modules included; and
    what these have beside their layers."""

    def __init__(self, source: LeafSource, names: CheckpointNames, programs: AttentionPrograms):
        templates, mesh, config = programs.templates, programs.mesh, programs.config
        self.held: list[HeldBlock] = []
        """Blocks of the checkpoint that this process holds."""

        def load(name: str, template: Template, sources: Sources) -> Leaves:
            leaves = load_leaves(source, template, sources, mesh, ATTENTION_RULES)
            self.held.append(HeldBlock(name, sources, template, lambda: leaves))
            return leaves

        self.embedding = load("embedding", templates.embedding, names.embedding)
        self.head = load("head", templates.head, names.head)
        self.layers = [
            load(
                f"layers.{layer}.attention",
                templates.attention[config.layer(layer)],
                names.attention[layer],
            )
            for layer in range(config.all_layers)
        ]
        self.predictions = [
            load(f"layers.{layer}.prediction", templates.prediction, sources)
            for layer, sources in enumerate(names.predictions, config.layers)
        ]


class PassExecutables(NamedTuple):
    """What the passes of prediction modules run after a step with drafts."""

    first: jax.stages.Compiled
    predict: jax.stages.Compiled
    further: jax.stages.Compiled
    """Between passes of different modules."""
    again: jax.stages.Compiled
    """Between passes of one."""


class AttentionExecutables(NamedTuple):
    """What a step of one bucket runs."""

    enter: jax.stages.Compiled
    attend: dict[LayerKind, jax.stages.Compiled]
    leave: jax.stages.Compiled
    sampling: SamplingExecutables | None
    drafting: DraftingExecutables | None = None
    passes: PassExecutables | None = None
    """None: there are no prediction modules, or the step has no drafts."""


def attention_executables(
    programs: AttentionPrograms, buckets: Sequence[Bucket], get: Get
) -> dict[Bucket, AttentionExecutables]:
    """Puts together what the steps of each bucket run. Buckets with equal tokens share programs
    that read no pages."""
    first, later = _kinds(programs)

    def step(bucket: Bucket) -> AttentionExecutables:
        plain = bucket.undrafted
        return AttentionExecutables(
            get(ProgramKey("enter", first, plain), programs.enter, plain, first),
            {
                kind: get(ProgramKey("attend", kind, plain), programs.attend, plain, kind)
                for kind in later
            },
            get(ProgramKey("leave", None, bucket.of_tokens), programs.leave, bucket),
            sampling_executables(programs, bucket, get),
            drafting_executables(programs, bucket, get),
            _passes(programs, bucket, get) if programs.config.modules and bucket.drafts else None,
        )

    return {bucket: step(bucket) for bucket in buckets}


def _passes(programs: AttentionPrograms, bucket: Bucket, get: Get) -> PassExecutables:
    tokens, plain = bucket.of_tokens, bucket.undrafted
    again = get(ProgramKey("again", None, tokens), programs.next_pass, bucket, True)
    further = again
    if programs.config.modules > 1:
        further = get(ProgramKey("further", None, tokens), programs.next_pass, bucket, False)
    return PassExecutables(
        get(ProgramKey("first_pass", None, tokens), programs.first_pass, bucket),
        get(ProgramKey("predict", None, plain), programs.predict, plain),
        further,
        again,
    )


def _kinds(programs: AttentionPrograms) -> tuple[LayerKind, list[LayerKind]]:
    """Kind of layer 0, and the kinds of all others."""
    kinds = [programs.config.layer(layer) for layer in range(programs.config.layers)]
    return kinds[0], list(dict.fromkeys(kinds[1:]))


def build_attention(
    templates: ModelTemplates,
    deployment: Deployment,
    mesh: Mesh,
    source: LeafSource,
    names: CheckpointNames,
) -> tuple[AttentionPrograms, dict[Bucket, AttentionExecutables], AttentionWeights]:
    """Loads and compiles: what `AttentionWorker` takes beside its link."""
    programs = AttentionPrograms(templates, deployment, mesh)
    buckets = deployment_buckets(deployment)
    with load_progress(source, 2 + templates.config.all_layers) as counted:
        weights = AttentionWeights(counted, names, programs)
    executables, _ = compile_steps(attention_executables, programs, buckets)
    return programs, executables, weights


_Layer = tuple[Call, SendMessage, ReceiveAnswer, Leaves]
"""What the stages of one layer run, looked up once: the attend program, in layer 0 `enter`, both
directions of the link, and the weights. No named tuple: Python takes those apart more slowly."""


class _Pass(NamedTuple):
    """What a pass of a prediction module runs."""

    layer: int
    predict: Call
    send: SendMessage
    receive: ReceiveAnswer
    leaves: Leaves
    """Of the module and its layer."""
    module: Leaves
    next: Call
    numbers: jax.Array
    """As `AttentionPrograms.next_pass` takes them."""


class AttentionWorker:
    """Runs the attention stages of all lanes."""

    def __init__(
        self,
        programs: AttentionPrograms,
        executables: dict[Bucket, AttentionExecutables],
        weights: AttentionWeights,
        link: AttentionEnd,
    ):
        self._programs = programs
        self._executables, self._weights = executables, weights
        kinds = [programs.config.layer(layer) for layer in range(programs.config.layers)]
        lanes = programs.deployment.lanes
        self._layers: dict[tuple[int, Bucket], list[_Layer]] = {
            (lane, bucket): [
                (
                    hot_call(bound.attend[kind] if layer else bound.enter),
                    link.sender(layer, bucket.tokens, lane),
                    link.receiver(layer, bucket.tokens, lane),
                    weights.layers[layer],
                )
                for layer, kind in enumerate(kinds)
            ]
            for bucket, bound in executables.items()
            for lane in range(lanes)
        }
        self._passes = {
            (lane, bucket): [
                self._pass(bound.passes, lane, bucket, number, link)
                for number in range(bucket.drafts)
            ]
            for bucket, bound in executables.items()
            if bound.passes is not None
            for lane in range(lanes)
        }
        self.renew()

    def renew(self) -> None:
        """Has empty pages, and knows no sequence: before the first step, and after a lost one."""
        programs = self._programs
        lanes, drafts = programs.deployment.lanes, programs.deployment.drafts
        self._pages: list[list[jax.Array]] = []  # the old ones are free before there are new ones
        self._pages = [
            list(zeroed(programs.pool(programs.config.layer(layer)).arrays, programs.mesh))
            for layer in range(programs.config.all_layers)
        ]
        self._put = GroupPut(programs)
        self._last_tokens = [self._put.last_tokens() for _ in range(lanes)]
        self._sampling = Sampling(programs, self._weights.head, self._put.rows)
        self._drafting = Drafting(programs, self._put.rows) if drafts else None

    def held(self) -> list[HeldBlock]:
        """Returns the blocks of the checkpoint that this process holds."""
        return self._weights.held

    def kv_arrays(self) -> KVArrays:
        """This worker's pages, for hand-offs."""
        return KVArrays(self._programs, False, self._flat_pages, self._set_pages)

    def _flat_pages(self) -> list[jax.Array]:
        return [array for layer in self._pages for array in layer]

    def _set_pages(self, pages: Sequence[jax.Array]) -> None:
        kinds = len(self._programs.pages_specs)
        for layer, arrays in enumerate(self._pages):
            arrays[:] = pages[layer * kinds : (layer + 1) * kinds]

    def begin(self, plan: StepPlan) -> Stages:
        """Puts a step on a lane. Its stages: for each layer attend, which sends its message, too,
        and combine, likewise for each pass of a prediction module, and leave at the end.

        They make the message in attend, the answer in combine, and a `Finished` in leave.
        """
        return self._step(plan, *self._put(plan))

    def _step(self, plan: StepPlan, batch: jax.Array, table: jax.Array) -> Stages:
        """The stages of one step.

        The first attend is `enter`, which takes the last tokens, the batch and the embedding where
        the others take the residual stream (and donate it), what `enter` made of the batch, and the
        answer of the layer before.
        """
        pages, lane = self._pages, plan.lane
        executables = self._executables[plan.bucket]
        x = before = self._last_tokens[lane]
        drafting = executables.drafting
        if self._drafting is not None and drafting is not None:
            batch = self._drafting.resolve(drafting, plan, batch, before)
        combined: Arrays = self._weights.embedding
        shared, arrays = [batch], len(pages[0])
        for layer, (attend, send, receive, leaves) in enumerate(self._layers[lane, plan.bucket]):
            x, message, *made = attend(x, table, *shared, *pages[layer], *combined, *leaves)
            pages[layer], shared = made[:arrays], made[arrays:] or shared
            send(message)
            yield message
            del message
            combined = receive()
            yield combined[0]
        left = executables.leave(x, before, batch, *combined, *self._weights.head)
        stream = x, *combined
        last, finished, lengths = self._sampling.finish(
            plan, executables.sampling, batch, before, left, stream
        )
        self._last_tokens[lane] = last
        if self._drafting is not None and drafting is not None and plan.proposes:
            end = self._drafting.end(finished, batch, table, stream, last, lengths)
            if executables.passes is not None:
                drafts = yield from self._predict(executables.passes, end)
                finished = self._drafting.keep(finished, drafts)
            elif not self._programs.config.modules:
                finished = self._drafting.keep(finished, self._drafting.look_up(drafting, end))
        yield finished

    def _predict(
        self, executables: PassExecutables, end: StepEnd
    ) -> Generator[jax.Array | None, None, jax.Array]:
        """The stages of the passes of prediction modules, as those of further layers; returns the
        drafts."""
        weights, pages, drafts = self._weights, self._pages, end.drafts
        hidden, batch = executables.first(
            end.batch, end.sampled, end.lengths, *end.stream, *weights.head
        )
        for one in self._passes[end.plan.lane, end.plan.bucket]:
            x, message, *pages[one.layer] = one.predict(
                hidden, batch, end.table, *pages[one.layer], *weights.embedding, *one.leaves
            )
            one.send(message)
            yield message
            combined = one.receive()
            yield combined[0]
            hidden, batch, drafts = one.next(
                one.numbers, batch, drafts, x, *combined, *one.module, *weights.head
            )
        return drafts

    def _pass(
        self, bound: PassExecutables, lane: int, bucket: Bucket, number: int, link: AttentionEnd
    ) -> _Pass:
        """The pass that makes a lane's draft of this number."""
        programs, weights = self._programs, self._weights
        config = programs.config
        layer = layers_of(config, bucket)[config.layers + number]
        module = layer - config.layers
        longest = bucket.pages * programs.deployment.cache.page_size
        numbers = np.asarray([number, module + 1, longest], np.int32)
        sharding = cached_sharding(programs.mesh, REPLICATED)
        return _Pass(
            layer,
            hot_call(bound.predict),
            link.sender(layer, bucket.tokens, lane),
            link.receiver(layer, bucket.tokens, lane),
            (*weights.predictions[module], *weights.layers[layer]),
            weights.predictions[module],
            hot_call(bound.again if module == config.modules - 1 else bound.further),
            jax.make_array_from_callback(numbers.shape, sharding, numbers.__getitem__),
        )
