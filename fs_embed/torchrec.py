"""TorchRec `ModuleSharder`s: prioritized tables inside `DistributedModelParallel`, where its planner puts them.

    sharders = [
        PrioritizedEmbeddingCollectionSharder(RowWiseAdagrad(lr=0.02)),
        PrioritizedEmbeddingBagCollectionSharder(SGD(lr=0.1), others=EmbeddingBagCollectionSharder(fused_params)),
    ]
    model = DistributedModelParallel(model, sharders=sharders)

Tables that are planned row-wise are prioritized; with `others`, all other tables stay TorchRec's. Under
`TrainPipelineSparseDist` batches are announced by the pipeline; under any other loop announce them, or every step is a
miss.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Unpack, cast

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor, nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embedding_sharding import KJTListSplitsAwaitable
from torchrec.distributed.embedding_types import (
    BaseEmbeddingSharder,
    EmbeddingComputeKernel,
    KJTList,
    ShardedEmbeddingModule,
)
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.types import LazyAwaitable, LazyNoWait, NoWait, ShardingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection, get_embedding_names_by_table
from torchrec.optim.fused import FusedOptimizer, FusedOptimizerModule
from torchrec.optim.keyed import CombinedOptimizer
from torchrec.sparse.jagged_tensor import KeyedTensor

from fs_embed.bag_collection import PrioritizedEmbeddingBagCollection
from fs_embed.collection import FeatureModule, PrioritizedEmbeddingCollection
from fs_embed.optim import SGD, Adagrad, Adam, RowOptimizer, RowWiseAdagrad
from fs_embed.table_optimizers import reader_of
from fs_embed.tables import ShardingOptions

ROW_WISE = ShardingType.ROW_WISE.value
_FBGEMM_NAMES: dict[type, EmbOptimType] = {
    SGD: EmbOptimType.EXACT_SGD,
    Adagrad: EmbOptimType.EXACT_ADAGRAD,
    RowWiseAdagrad: EmbOptimType.EXACT_ROWWISE_ADAGRAD,
    Adam: EmbOptimType.ADAM,
}


class _Sharder(BaseEmbeddingSharder[Any]):
    """What both sharders are; they differ in the module and in what a TorchRec sharder of it is."""

    _theirs: Callable[[], Any]

    def __init__(self, optimizer: RowOptimizer, *, others: Any = None, **options: Unpack[ShardingOptions]) -> None:
        rate = {"optimizer": _FBGEMM_NAMES.get(type(optimizer)), "learning_rate": optimizer.lr}
        super().__init__(fused_params=rate)  # by which the planner estimates the optimizer's memory
        self.optimizer, self.others, self.options = optimizer, others, options

    def shardable_parameters(self, module: Any) -> dict[str, nn.Parameter]:
        return (self.others or self._theirs()).shardable_parameters(module)

    def sharding_types(self, compute_device_type: str) -> list[str]:
        theirs: list[str] = [] if self.others is None else self.others.sharding_types(compute_device_type)
        return [ROW_WISE, *(kind for kind in theirs if kind != ROW_WISE)]

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        if sharding_type == ROW_WISE:
            return [EmbeddingComputeKernel.FUSED.value]
        return self.others.compute_kernels(sharding_type, compute_device_type)

    def shard(  # pyright: ignore[reportIncompatibleVariableOverride]  declared a class method there, and is none
        self,
        module: Any,
        params: Mapping[str, Any],
        env: Any,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> "ShardedCollection":
        return ShardedCollection(module, params, env, self, device, module_fqn)


class PrioritizedEmbeddingCollectionSharder(_Sharder):
    """Shards `EmbeddingCollection`s by rows, with prioritized exchanges.

    Args:
        optimizer: For the row-wise tables; it takes the place of `apply_optimizer_in_backward`.
        others: Offers the planner its sharding types besides row-wise, and shards the tables that are planned so;
            without it all tables are row-wise.
        options: See `Sharding`; the group is that of `DistributedModelParallel`.
    """

    _theirs = EmbeddingCollectionSharder

    @property
    def module_type(self) -> type[EmbeddingCollection]:
        return EmbeddingCollection


class PrioritizedEmbeddingBagCollectionSharder(_Sharder):
    """Shards `EmbeddingBagCollection`s by rows; see `PrioritizedEmbeddingCollectionSharder`."""

    _theirs = EmbeddingBagCollectionSharder

    @property
    def module_type(self) -> type[EmbeddingBagCollection]:
        return EmbeddingBagCollection


class ShardedCollection(ShardedEmbeddingModule[KJTList, Any, Any, Any], FusedOptimizerModule):
    """A collection with prioritized row-wise tables, the others as TorchRec shards them; keys are the collection's own.

    Attributes:
        prioritized: The row-wise tables, None where there are none. The pipeline announces a batch to it in
            `input_dist`.
    """

    def __init__(
        self,
        module: Any,
        plan: Mapping[str, Any],
        env: Any,
        sharder: _Sharder,
        device: torch.device | None,
        module_fqn: str | None,
    ) -> None:
        super().__init__()
        self._unsharded_type: type[nn.Module] = type(module)
        self._pools = isinstance(module, EmbeddingBagCollection)
        self.module_sharding_plan = plan
        configs: list[Any] = module.embedding_bag_configs() if self._pools else module.embedding_configs()
        mine = [c for c in configs if plan[c.name].sharding_type == ROW_WISE]
        rest = [c for c in configs if plan[c.name].sharding_type != ROW_WISE]
        if rest and sharder.others is None:
            kinds = {c.name: plan[c.name].sharding_type for c in rest}
            raise ValueError(
                f"tables must be planned row-wise, got {kinds}: give the sharder `others`, a TorchRec sharder for them"
            )
        self.prioritized = _prioritize(module, mine, plan, env, sharder, device) if mine else None
        # Not a submodule, as lookups of TorchRec's modules are none: names in the model are those of one collection.
        self._others = [_shard_rest(module, rest, plan, env, sharder, device, module_fqn)] if rest else []
        self._their_features = tuple(dict.fromkeys(f for c in rest for f in c.feature_names))
        names = dict(zip((c.name for c in configs), get_embedding_names_by_table(configs), strict=True))
        self._output_names = [name for c in configs for name in names[c.name]]
        self._our_names, self._their_names = (_renamed(tables, names) for tables in (mine, rest))
        faces: list[Any] = [] if self.prioritized is None else [("", _OptimizerFace(self.prioritized))]
        self._fused_optimizer = CombinedOptimizer([*faces, *(("", o.fused_optimizer) for o in self._others)])
        self.register_state_dict_post_hook(_leave_out_prefix)
        self.register_load_state_dict_pre_hook(_put_in_prefix)

    # Lookups.

    def create_context(self) -> Any:
        return self._others[0].create_context() if self._others else _no_context(self._pools)

    def input_dist(self, ctx: Any, features: Any) -> KJTListSplitsAwaitable[Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Announces `features` as the batch that is looked up after those announced before; called by a pipeline."""
        if self.prioritized is not None:
            self.prioritized.prefetch([features])
        return self._input_dist(ctx, features)

    def compute_and_output_dist(self, ctx: Any, input: KJTList) -> LazyAwaitable[Any]:
        *their_inputs, features = input.features
        theirs = [o.compute_and_output_dist(ctx, KJTList(their_inputs)) for o in self._others]
        ours = {} if self.prioritized is None else _by_name(self.prioritized(features), self._our_names)
        return _Joined(ours, theirs, self._their_names, self._output_names, self._pools)

    def forward(self, features: Any) -> LazyAwaitable[Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx = self.create_context()
        return self.compute_and_output_dist(ctx, self._input_dist(ctx, features).wait().wait())

    def compute(self, ctx: Any, dist_input: KJTList) -> Any:
        return self.compute_and_output_dist(ctx, dist_input).wait()

    def output_dist(self, ctx: Any, output: Any) -> LazyAwaitable[Any]:
        return LazyNoWait(output)

    def _input_dist(self, ctx: Any, features: Any) -> KJTListSplitsAwaitable[Any]:
        keys: list[str] = list(features.keys())
        # Our input comes last: TorchRec pairs its contexts with the first ones.
        awaitables: list[Any] = []
        for other in self._others:
            some = features.permute([keys.index(name) for name in self._their_features])
            awaitables += other.input_dist(ctx, some).awaitables
        return KJTListSplitsAwaitable([*awaitables, NoWait(NoWait(features))], ctx)

    # State and parameters.

    @property
    def fused_optimizer(self) -> CombinedOptimizer:
        return self._fused_optimizer

    @property
    def unsharded_module_type(self) -> type[nn.Module]:
        return self._unsharded_type

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        for other in self._others:
            yield from other.named_parameters(prefix, True, remove_duplicate)

    def train(self, mode: bool = True) -> "ShardedCollection":
        for other in self._others:
            other.train(mode)
        return super().train(mode)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        for other in self._others:
            other.state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)

    def _load_from_state_dict(  # pyright: ignore[reportIncompatibleMethodOverride]  torch declares these keyword only
        self, state_dict: Any, prefix: str, local_metadata: Any, strict: bool, *problems: list[str]
    ) -> None:
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, *problems)
        for other in self._others:
            wanted = other.state_dict()
            other.load_state_dict({key: state_dict.pop(prefix + key) for key in wanted}, strict)


class _Joined(LazyAwaitable[Any]):
    """Rows of both kinds of tables, in the collection's order."""

    def __init__(
        self,
        ours: dict[str, Any],
        theirs: Sequence[Any],
        their_names: Mapping[str, str],
        order: Sequence[str],
        pools: bool,
    ) -> None:
        super().__init__()
        self._ours, self._theirs, self._their_names, self._order, self._pools = ours, theirs, their_names, order, pools

    def _wait_impl(self) -> Any:
        rows = dict(self._ours)
        for awaitable in self._theirs:
            rows |= _by_name(awaitable.wait(), self._their_names)
        if not self._pools:
            return {name: rows[name] for name in self._order}
        pooled = [cast("Tensor", rows[name]) for name in self._order]
        return KeyedTensor(list(self._order), [p.shape[1] for p in pooled], torch.cat(pooled, 1))


class _OptimizerFace(FusedOptimizer):
    """The fused optimizer as `DistributedModelParallel` wants it: its state by weight, and a learning rate."""

    def __init__(self, module: FeatureModule) -> None:
        self._module, self.defaults = module, {"_save_param_groups": False}
        self._weights = {key: module.tables.weight(number) for number, key in enumerate(module.state_keys)}
        group = {"params": list(self._weights.values()), "lr": module.tables.stores[0].optimizer.lr}
        self.param_groups = [group]
        for store in module.tables.stores:
            store.lr = reader_of(group)
        self._num_steps: dict[str, Tensor] = {}
        self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = {}, {}

    @property
    def params(self) -> dict[str, Tensor]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._weights

    @property
    def state(self) -> dict[Tensor, dict[str, Tensor]]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Views of the state as it is after all updates; loading writes into them."""
        state = {self._weights[key]: of_table for key, of_table in self._module.optimizer_state().items()}
        for of_table in state.values():
            for name in of_table.keys():
                if name.endswith(".num_steps"):
                    of_table[name] = self._num_steps.setdefault(name, of_table[name]).copy_(of_table[name])
        return state

    def post_load_state_dict(self) -> None:
        for number, table in enumerate(self._module.tables.tables):
            if f"{table.name}.num_steps" in self._num_steps:
                self._module.tables.store_of(number).num_steps = int(self._num_steps[f"{table.name}.num_steps"])

    def step(self, closure: Any = None) -> None:
        """Nothing: rows are updated in the backward."""

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Nothing: rows have no gradients."""


def _prioritize(
    module: Any, tables: Sequence[Any], plan: Mapping[str, Any], env: Any, sharder: _Sharder, device: Any
) -> FeatureModule:
    if env.process_group is None:
        raise ValueError("prioritized tables must have a process group to train in, this environment has none")
    holders = _holders(module)
    for config in tables:
        if getattr(holders[config.name].weight, "_optimizer_classes", None):
            raise ValueError(
                f"table {config.name!r} must not have an optimizer of apply_optimizer_in_backward: the sharder's "
                f"{sharder.optimizer} updates it"
            )
    weights = None if module.device.type == "meta" else [holders[c.name].weight for c in tables]
    options: Any = {**sharder.options, "group": env.process_group}
    options |= {"optimizer": sharder.optimizer, "weights": weights, "device": device}
    if isinstance(module, EmbeddingBagCollection):
        made = PrioritizedEmbeddingBagCollection(tables, is_weighted=module.is_weighted(), **options)
    else:
        made = PrioritizedEmbeddingCollection(tables, need_indices=module.need_indices(), **options)
    made.train(module.training)
    for number, config in enumerate(tables):
        planned = [(s.shard_offsets[0], s.shard_sizes[0]) for s in plan[config.name].sharding_spec.shards]
        store, place = made.tables.place[number]
        owned = [made.tables.stores[store].shards.owned(place, rank) for rank in range(made.tables.world_size)]
        if planned != [(rows.start, len(rows)) for rows in owned]:
            raise ValueError(
                f"table {config.name!r} must be cut into blocks of equal size, one on each rank; the plan has "
                f"(first row, rows) {planned}"
            )
    return made


def _shard_rest(
    module: Any,
    tables: Sequence[Any],
    plan: Mapping[str, Any],
    env: Any,
    sharder: _Sharder,
    device: Any,
    module_fqn: str | None,
) -> Any:
    """TorchRec's sharded module of some of the collection's tables."""
    meta = torch.device("meta")
    if isinstance(module, EmbeddingBagCollection):
        some: Any = EmbeddingBagCollection(tables=list(tables), is_weighted=module.is_weighted(), device=meta)
    else:
        some = EmbeddingCollection(tables=list(tables), need_indices=module.need_indices(), device=meta)
    holders, theirs = _holders(some), _holders(module)
    for config in tables:
        holders[config.name] = theirs[config.name]  # the very parameters: they carry what TorchRec attaches to them
    sharded = sharder.others.shard(some, {c.name: plan[c.name] for c in tables}, env, device, module_fqn)
    if module.device.type != "meta":
        sharded.load_state_dict(some.state_dict())
    return sharded.train(module.training)


def _holders(module: Any) -> nn.ModuleDict:
    return module.embedding_bags if isinstance(module, EmbeddingBagCollection) else module.embeddings


def _renamed(tables: Sequence[Any], names: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """What a collection of `tables` alone calls its outputs -> what the whole collection calls them."""
    alone = get_embedding_names_by_table(list(tables))
    return {
        old: new for table, of_table in zip(tables, alone, strict=True)
        for old, new in zip(of_table, names[table.name], strict=True)
    }  # fmt: skip


def _by_name(out: Any, names: Mapping[str, str]) -> dict[str, Any]:
    rows: Mapping[str, Any] = out.to_dict() if isinstance(out, KeyedTensor) else out
    return {names[name]: value for name, value in rows.items()}


def _no_context(pools: bool) -> Any:
    if pools:
        from torchrec.distributed.embeddingbag import EmbeddingBagCollectionContext

        return EmbeddingBagCollectionContext()
    from torchrec.distributed.embedding import EmbeddingCollectionContext

    return EmbeddingCollectionContext()


def _leave_out_prefix(module: nn.Module, state_dict: Any, prefix: str, local_metadata: Any) -> None:
    inner = f"{prefix}prioritized."
    for key in [k for k in state_dict if k.startswith(inner)]:
        state_dict[prefix + key.removeprefix(inner)] = state_dict.pop(key)


def _put_in_prefix(module: Any, state_dict: Any, prefix: str, *_: Any) -> None:
    if module.prioritized is not None:
        for key in module.prioritized.state_keys:
            if prefix + key in state_dict:
                state_dict[f"{prefix}prioritized.{key}"] = state_dict.pop(prefix + key)
