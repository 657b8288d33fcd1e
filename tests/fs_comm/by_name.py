"""One rank of a job whose default group is `smfree`, begun by torchrun; prints what it found."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import fs_comm

dist.init_process_group("smfree")
rank, size = dist.get_rank(), dist.get_world_size()
assert isinstance(dist.group.WORLD, fs_comm.SmFreeGroup)
out = torch.empty(size)
dist.all_to_all_single(out, torch.full((size,), float(rank)))
assert out.tolist() == list(range(size))

side = dist.new_group([1, 0])  # of the default group's backend
assert isinstance(side, fs_comm.SmFreeGroup)
parts = [torch.empty(1) for _ in range(2)]
dist.all_gather(parts, torch.tensor([float(rank)]), group=side)
assert torch.cat(parts).tolist() == [0.0, 1.0]  # torch sorts the ranks of a group

model = DistributedDataParallel(torch.nn.Linear(1, 1, bias=False))
model(torch.full((1, 1), float(rank))).sum().backward()
assert model.module.weight.grad.item() == (size - 1) / 2  # the mean of all ranks'

mesh_group = init_device_mesh("cpu", (size,)).get_group()
dist.all_gather(parts, torch.tensor([float(rank)]), group=mesh_group)
dist.barrier()
dist.destroy_process_group()
print(f"rank {rank} is done")
