"""The binding `pyverbs` (rdma-core's own; Debian: python3-pyverbs): holds the GIL in every call, none of which blocks.

Its objects free badly: a request owns a copy of its piece list and never lets go of it. So requests are built once and
kept, and pieces are shared with them by `sg_list`.
"""

# The binding has no types.
# pyright: reportMissingImports=false, reportUnknownParameterType=false

import threading
from collections.abc import Sequence
from ipaddress import IPv6Address
from socket import htonl, ntohl

from pyverbs.addr import GID, AHAttr, GlobalRoute
from pyverbs.cq import CQ, CompChannel
from pyverbs.device import Context
from pyverbs.mr import MR
from pyverbs.pd import PD
from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr
from pyverbs.wr import SGE, RecvWR, SendWR

from fs_comm.transports import verbs_binding as vb

POLL = 64
_opening = threading.Lock()


class PyverbsBinding:
    name: vb.BindingName = "pyverbs"

    def open(self, device: str, *, num_completions: int) -> "PyverbsDevice":
        return PyverbsDevice(Context(name=device), num_completions)


class PyverbsDevice:
    def __init__(self, context: Context, num_completions: int) -> None:
        self._context = context
        self._pd = PD(context)
        self._channel, self.fd = _channel_with_fd(context)
        self._cq = CQ(context, num_completions, None, self._channel, 0)
        self._regions: list[MR] = []

    def port(self, number: int) -> vb.PortInfo:
        port = self._context.query_port(number)
        return vb.PortInfo(port.lid, port.active_mtu, port.max_msg_sz)

    def max_requests(self) -> int:
        return self._context.query_device().max_qp_wr

    def register(self, address: int, num_bytes: int) -> vb.Region:
        region = MR(self._pd, num_bytes, vb.ACCESS, address=address)
        self._regions.append(region)
        return vb.Region(region.lkey, region.rkey)

    def create_queue_pair(self, *, max_sends: int, max_receives: int) -> "PyverbsQueuePair":
        limits = QPCap(max_send_wr=max_sends, max_recv_wr=max_receives, max_send_sge=1, max_recv_sge=1)
        attributes = QPInitAttr(qp_type=vb.QP_TYPE_RC, scq=self._cq, rcq=self._cq, cap=limits)
        return PyverbsQueuePair(QP(self._pd, attributes))

    def take_event(self) -> None:
        self._channel.get_cq_event(self._cq)
        self._cq.ack_events(1)

    def arm(self) -> None:
        self._cq.req_notify()

    def poll(self) -> Sequence[vb.Completion]:
        _, found = self._cq.poll(POLL)
        return [vb.Completion(wc.wr_id, wc.status, wc.qp_num, wc.byte_len, ntohl(wc.imm_data)) for wc in found]

    def close(self) -> None:
        for region in self._regions:
            region.close()
        for part in (self._cq, self._channel, self._pd, self._context):
            part.close()


class PyverbsQueuePair:
    def __init__(self, qp: QP) -> None:
        self._qp = qp
        self._receive = RecvWR(wr_id=vb.RECEIVE, num_sge=1, sg=[SGE(0, 0, 0)])
        self._receive.num_sge = 0  # the constructor insists on one; a write with immediate delivers no payload

    @property
    def number(self) -> int:
        return self._qp.qp_num

    def connect(self, path: vb.Path) -> None:
        attributes = QPAttr(port_num=path.port)
        attributes.qp_access_flags = vb.ACCESS
        self._qp.to_init(attributes)
        route = GlobalRoute(
            dgid=GID(IPv6Address(path.peer_gid).exploded), sgid_index=path.gid_index, hop_limit=vb.HOP_LIMIT
        )
        attributes.ah_attr = AHAttr(dlid=path.peer_lid, is_global=int(path.routed), port_num=path.port, gr=route)
        attributes.path_mtu = path.mtu
        attributes.dest_qp_num = path.peer_queue_pair
        attributes.rq_psn = path.peer_packet_number
        attributes.max_dest_rd_atomic = 1
        attributes.min_rnr_timer = vb.RNR_TIMER
        # Every one of these is zero by default, and a timeout of zero waits for ever.
        attributes.timeout = path.ack_timeout
        attributes.retry_cnt = path.retries
        attributes.rnr_retry = vb.RNR_RETRIES
        attributes.sq_psn = path.packet_number
        attributes.max_rd_atomic = 1
        _through_states(self._qp, attributes)

    def post_receives(self, count: int) -> None:
        for _ in range(count):
            self._qp.post_recv(self._receive)

    def write(self, address: int, local_key: int, peer_address: int, peer_key: int) -> "PyverbsWrite":
        return PyverbsWrite(self._qp, address, local_key, peer_address, peer_key)

    def close(self) -> None:
        self._qp.close()


class PyverbsWrite:
    def __init__(self, qp: QP, address: int, local_key: int, peer_address: int, peer_key: int) -> None:
        self._qp = qp
        self._piece = SGE(address, 0, local_key)
        self._request = SendWR(num_sge=1, sg=[self._piece])
        self._request.sg_list = self._piece  # shares it, so that its length can be changed
        self._request.set_wr_rdma(peer_key, peer_address)

    def post(self, num_bytes: int, immediate: int | None, request: int, signalled: bool) -> None:
        wr = self._request
        self._piece.length = num_bytes
        wr.num_sge = 1 if num_bytes else 0
        wr.opcode = vb.WRITE if immediate is None else vb.WRITE_WITH_IMMEDIATE
        wr.imm_data = htonl(immediate or 0)
        wr.wr_id = request
        wr.send_flags = vb.SIGNALLED if signalled else 0
        self._qp.post_send(wr)


def _through_states(qp: QP, attributes: QPAttr) -> None:
    """INIT → RTR → RTS by single steps: `to_rts` alone would begin again at INIT and lose the receives posted there."""
    state, av, path_mtu, dest_qpn, rq_psn = 1 << 0, 1 << 7, 1 << 8, 1 << 20, 1 << 12
    max_dest_rd, min_rnr = 1 << 17, 1 << 15
    attributes.qp_state = 2  # RTR
    qp.modify(attributes, state | av | path_mtu | dest_qpn | rq_psn | max_dest_rd | min_rnr)
    timeout, retry, rnr_retry, sq_psn, max_rd = 1 << 9, 1 << 10, 1 << 11, 1 << 16, 1 << 13
    attributes.qp_state = 3  # RTS
    qp.modify(attributes, state | timeout | retry | rnr_retry | sq_psn | max_rd)


def _channel_with_fd(context: Context) -> tuple[CompChannel, int]:
    """A completion channel and its descriptor, which this binding does not give: it is the one that came up."""
    with _opening:
        before = vb.rdma_descriptors()
        channel = CompChannel(context)
        fresh = vb.rdma_descriptors() - before
    if len(fresh) != 1:
        channel.close()
        raise OSError(f"one new completion channel must show in /proc/self/fd, got {len(fresh)}: is /proc mounted?")
    return channel, fresh.pop()


BINDING: vb.Binding = PyverbsBinding()
