"""The networks of the machines that ``Hardware.preset`` knows, each figure with its source.

Latencies are a library's step, not a wire's. NCCL's own model (src/graph/tuning.cc, hwLat, Ring/Simple) takes 3.4 us on
NVLink and 14 us on a network; HCCL publishes none, so the same are assumed for it.

Queue pairs: 4,092 for each RDMA device is assumed. It is the default of Intel's irdma driver, whose option limits_sel
goes from 124 to 131,068 (the driver's README; NVIDIA/nccl issue 622), and about the 4,096 of AMD's 400 Gbit/s NIC
(max_qp in ROCm/rocm-systems pull request 9335). A ConnectX has 131,072 (Linux, mlx5: log_max_qp 17), yet all-to-alls
fail far below: of queue pairs on 256 GPUs (NVIDIA/nccl-tests issue 78), of memory for completion queues on 700 nodes
(NVIDIA/nccl issue 1191). Ascend documents no limit.
"""

from __future__ import annotations

from muon_compile.plan.network import Level, Network, Plane

_INSIDE_SECONDS, _NETWORK_SECONDS = 3.4e-6, 14e-6
_MAX_QUEUE_PAIRS = 4092

# NVIDIA H100 data sheet: NVLink at 900 GB/s both ways; DGX H100 and H200: 8 GPUs, a ConnectX-7 of 400 Gbit/s for each.
# NCCL opens a queue pair for each direction and channel between two ranks (NCCL_IB_QPS_PER_CONNECTION=1, its default);
# assumed: one channel in both directions for an all-to-all, two channels in one for a ring.
_NVIDIA = Network(
    levels=(
        Level(name="node", ranks=8, latency_seconds=_INSIDE_SECONDS, bytes_per_second=900e9 / 2, plane="nvlink"),
        Level(name="cluster", latency_seconds=_NETWORK_SECONDS, bytes_per_second=400e9 / 8, plane="infiniband"),
    ),
    planes=(
        Plane(name="nvlink"),
        Plane(name="infiniband", max_queue_pairs=_MAX_QUEUE_PAIRS, queue_pairs_per_connection=2),
    ),
)

# HCCL creates one queue pair for two ranks that talk (CANN 8.5, HCCL_RDMA_QPS_PER_CONNECTION), which a static graph
# cannot change.
_ROCE = Plane(name="roce", max_queue_pairs=_MAX_QUEUE_PAIRS)

# Atlas 800T A2: 8 NPUs, 7 HCCS links each. Assumed, since no data sheet is public: links like a 910C die's, 28 GB/s one
# way, and a 200 Gbit/s RoCE port for each NPU.
_ASCEND_910B = Network(
    levels=(
        Level(name="node", ranks=8, latency_seconds=_INSIDE_SECONDS, bytes_per_second=7 * 28e9, plane="hccs"),
        Level(name="cluster", latency_seconds=_NETWORK_SECONDS, bytes_per_second=200e9 / 8, plane="roce"),
    ),
    planes=(Plane(name="hccs"), _ROCE),
)

# Zuo et al. 2025, CloudMatrix384 (arXiv 2506.12708): two dies to a package, joined at 270 GB/s one way; 384 packages on
# the unified bus, 392 GB/s one way for each; between super-nodes 400 Gbit/s of RoCE for each package. A die, which is
# one rank, has half. The bus itself takes under 1 us between nodes: what HCCL adds is assumed to be NVLink's.
_ASCEND_910C = Network(
    levels=(
        Level(name="package", ranks=2, latency_seconds=_INSIDE_SECONDS, bytes_per_second=270e9, plane="sio"),
        Level(name="super-node", ranks=768, latency_seconds=_INSIDE_SECONDS, bytes_per_second=392e9 / 2, plane="ub"),
        Level(name="cluster", latency_seconds=_NETWORK_SECONDS, bytes_per_second=400e9 / 8 / 2, plane="roce"),
    ),
    planes=(Plane(name="sio"), Plane(name="ub"), _ROCE),
)

# gloo between processes of one machine with two cores, measured on torch 2.13 beside other work: a message takes 87 us
# and 1.8 GB/s at best; assumed: half of that when all ranks send at once. TCP has no queue pairs.
_LOOPBACK = Network(
    levels=(Level(name="loopback", latency_seconds=90e-6, bytes_per_second=0.9e9, plane="gloo"),),
    planes=(Plane(name="gloo"),),
    shares_connections=True,
)

NETWORKS = {
    "cpu-2core": _LOOPBACK,
    "cpu-2core-native": _LOOPBACK,
    "h100": _NVIDIA,
    "h200": _NVIDIA,
    "ascend-910b": _ASCEND_910B,
    "ascend-910c": _ASCEND_910C,
}
