"""Swapping a model's embedding modules for prioritized ones, and back."""

import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar, Unpack, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from fs_embed.bag import PrioritizedEmbeddingBag
from fs_embed.bag_collection import PrioritizedEmbeddingBagCollection
from fs_embed.collection import FeatureModule, PrioritizedEmbeddingCollection
from fs_embed.embedding import PrioritizedEmbedding
from fs_embed.module import PrioritizedModule
from fs_embed.optim import RowOptimizer
from fs_embed.stale_optimizers import watch_for
from fs_embed.tables import ShardingOptions

M = TypeVar("M", bound=nn.Module)


def prioritize(
    model: M,
    *,
    optimizer: RowOptimizer,
    tables: "list[str] | None" = None,
    **sharding: Unpack[ShardingOptions],
) -> M:
    """Replaces the model's embedding modules by row-wise sharded ones, in place; collective.

    `nn.Embedding`, `nn.EmbeddingBag`, and TorchRec's `EmbeddingCollection` and `EmbeddingBagCollection` are replaced;
    subclasses are left alone. Call it before DistributedDataParallel or FSDP wraps the model and before the dense
    optimizer is built: both would keep the replaced weights.

    Args:
        tables: Names as in `named_modules()` of those to replace; None replaces all.
        optimizer: For all tables.
        sharding: See `Sharding`.

    Returns:
        `model`.

    Raises:
        ValueError: Nothing to replace, a name that is no such module, or a table that cannot be exact (`max_norm`,
            `scale_grad_by_freq`, `sparse`, pooling by maximum, a weight that another module shares).
    """
    makers = _makers()
    found = {name: m for name, m in model.named_modules() if type(m) in makers}
    # TorchRec's collections hold plain modules, which go with them.
    inner = {id(m) for outer in found.values() for m in outer.modules() if m is not outer}
    found = {name: m for name, m in found.items() if id(m) not in inner}
    if tables is not None:
        if unknown := sorted(set(tables) - set(found)):
            raise ValueError(f"tables must name embedding modules of the model, got {unknown}; it has {sorted(found)}")
        found = {name: found[name] for name in tables}
    if not found:
        raise ValueError(f"the model must have an embedding module to prioritize, {type(model).__name__} has none")
    _refuse_wrapped(model, found)
    for name, old in found.items():
        _refuse_inexact(model, name, old)
    for name, old in found.items():
        new = makers[type(old)](name, old, optimizer, sharding)
        new.train(old.training)
        if name == "":
            raise ValueError(
                "the model must hold the embedding module; put it into a module, which is swapped in place"
            )
        model.set_submodule(name, new)
        for weight in old.parameters():
            watch_for(weight, name)
    return model


def unprioritize(model: M) -> M:
    """Puts plain modules with the whole tables back, in place; collective."""
    for name, module in list(prioritized_modules(model)):
        plain = _plain(module, _whole_tables(module))
        plain.train(module.training)
        module.close()
        model.set_submodule(name, plain)
    return model


def prioritized_modules(model: nn.Module) -> "Iterator[tuple[str, PrioritizedModule]]":
    """The model's modules with sharded tables, by name as in `named_modules()`."""
    return ((name, m) for name, m in model.named_modules() if isinstance(m, PrioritizedModule))


Maker = Callable[[str, Any, RowOptimizer, ShardingOptions], PrioritizedModule]


def _makers() -> dict[type, Maker]:
    out: dict[type, Maker] = {nn.Embedding: _from_embedding, nn.EmbeddingBag: _from_bag}
    torchrec = sys.modules.get("torchrec.modules.embedding_modules")  # a model that holds its modules imported it
    if torchrec is not None:
        out[torchrec.EmbeddingCollection] = _from_collection
        out[torchrec.EmbeddingBagCollection] = _from_collection
    return out


def _from_embedding(name: str, old: nn.Embedding, optimizer: RowOptimizer, sharding: ShardingOptions) -> Any:
    return PrioritizedEmbedding(old.weight, optimizer=optimizer, padding_idx=old.padding_idx, name=name, **sharding)


def _from_bag(name: str, old: nn.EmbeddingBag, optimizer: RowOptimizer, sharding: ShardingOptions) -> Any:
    return PrioritizedEmbeddingBag(
        old.weight,
        optimizer=optimizer,
        pooling="mean" if old.mode == "mean" else "sum",
        padding_idx=old.padding_idx,
        include_last_offset=old.include_last_offset,
        name=name,
        **sharding,
    )


def _from_collection(name: str, old: Any, optimizer: RowOptimizer, sharding: ShardingOptions) -> FeatureModule:
    if hasattr(old, "embedding_bag_configs"):
        weights = [old.embedding_bags[c.name].weight for c in old.embedding_bag_configs()]
        return PrioritizedEmbeddingBagCollection(
            old.embedding_bag_configs(), is_weighted=old.is_weighted(), optimizer=optimizer, weights=weights, **sharding
        )
    weights = [old.embeddings[c.name].weight for c in old.embedding_configs()]
    return PrioritizedEmbeddingCollection(
        old.embedding_configs(), need_indices=old.need_indices(), optimizer=optimizer, weights=weights, **sharding
    )


def _whole_tables(module: PrioritizedModule) -> list[Tensor]:
    module.flush()
    shards = [module.tables.weight(number) for number in range(len(module.tables.tables))]
    return [w.full_tensor() if isinstance(w, DTensor) else w.clone() for w in shards]


def _plain(module: PrioritizedModule, whole: list[Tensor]) -> nn.Module:
    if isinstance(module, PrioritizedEmbedding):
        return nn.Embedding.from_pretrained(whole[0], freeze=False, padding_idx=module.padding_idx)
    if isinstance(module, PrioritizedEmbeddingBag):
        return nn.EmbeddingBag.from_pretrained(
            whole[0],
            freeze=False,
            mode=module.pooling,
            padding_idx=module.padding_idx,
            include_last_offset=module.include_last_offset,
        )
    from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

    if isinstance(module, PrioritizedEmbeddingBagCollection):
        plain = EmbeddingBagCollection(
            module.embedding_bag_configs(), is_weighted=module.is_weighted(), device=module.device
        )
        holders = cast("Any", plain.embedding_bags)
    else:
        assert isinstance(module, PrioritizedEmbeddingCollection)
        plain = EmbeddingCollection(
            module.embedding_configs(), need_indices=module.need_indices(), device=module.device
        )
        holders = cast("Any", plain.embeddings)
    with torch.no_grad():
        for table, weight in zip(module.tables.tables, whole, strict=True):
            holders[table.name].weight.copy_(weight)
    return plain


def _refuse_wrapped(model: nn.Module, names: Iterable[str]) -> None:
    for outer, wrapper in model.named_modules():
        if isinstance(wrapper, (DistributedDataParallel, FullyShardedDataParallel, FSDPModule)):
            inside = [name for name in names if outer == "" or name.startswith(f"{outer}.")]
            if inside:
                raise ValueError(
                    f"prioritize must come before {type(wrapper).__name__}, which keeps the weights of {inside}: call "
                    "prioritize(model), and then wrap it"
                )


def _refuse_inexact(model: nn.Module, name: str, module: Any) -> None:
    reasons = {
        "max_norm": (getattr(module, "max_norm", None) is not None, "a lookup would change rows that were prefetched"),
        "scale_grad_by_freq": (
            getattr(module, "scale_grad_by_freq", False),
            "it needs counts over the whole batch before any update",
        ),
        "sparse": (getattr(module, "sparse", False), "the fused optimizer takes the place of sparse gradients"),
        "mode='max'": (getattr(module, "mode", None) == "max", "only sums and means of rows are offered"),
    }
    for option, (is_set, why) in reasons.items():
        if is_set:
            raise ValueError(f"{name} must not use {option}: {why}; turn it off, or leave the table out of `tables`")
    own = dict(module.named_parameters())
    for weight in own.values():
        holders = [n for n, p in model.named_parameters(remove_duplicate=False) if p is weight]
        if len(holders) > 1:
            raise ValueError(f"the weight of {name} must belong to it alone, it is also {holders[1:]}: untie them")
