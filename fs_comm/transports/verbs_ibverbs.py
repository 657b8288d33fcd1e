"""The binding `ibverbs` (PyPI): releases the GIL in every call, and gives the channel's descriptor."""

# The binding has no types.
# pyright: reportMissingImports=false, reportUnknownParameterType=false

from collections.abc import Sequence

import ibverbs as ib

from fs_comm.transports import verbs_binding as vb

POLL = 64


class IbverbsBinding:
    name: vb.BindingName = "ibverbs"

    def open(self, device: str, *, num_completions: int) -> "IbverbsDevice":
        names = {d.name: d for d in ib.get_device_list()}
        if device not in names:
            raise OSError(f"ibverbs does not see the device {device}, only {', '.join(names) or 'none'}")
        return IbverbsDevice(names[device].open(), num_completions)


class IbverbsDevice:
    def __init__(self, context: ib.Context, num_completions: int) -> None:
        self._context = context
        self._pd = context.alloc_pd()
        self._channel = context.create_comp_channel()
        self._cq = context.create_cq(num_completions, self._channel)
        self._regions: list[ib.MR] = []

    @property
    def fd(self) -> int:
        return self._channel.fd

    def port(self, number: int) -> vb.PortInfo:
        port = self._context.query_port(number)
        return vb.PortInfo(port.lid, int(port.active_mtu), port.max_msg_sz)

    def max_requests(self) -> int:
        return self._context.query_device().max_qp_wr

    def register(self, address: int, num_bytes: int) -> vb.Region:
        region = self._pd.reg_mr(address, num_bytes, vb.ACCESS)
        self._regions.append(region)
        return vb.Region(region.lkey, region.rkey)

    def create_queue_pair(self, *, max_sends: int, max_receives: int) -> "IbverbsQueuePair":
        attributes = ib.QPInitAttr(
            send_cq=self._cq,
            recv_cq=self._cq,
            qp_type=vb.QP_TYPE_RC,
            max_send_wr=max_sends,
            max_recv_wr=max_receives,
        )
        return IbverbsQueuePair(self._pd.create_qp(attributes))

    def take_event(self) -> None:
        self._channel.get_cq_event()
        self._cq.ack_events(1)

    def arm(self) -> None:
        self._cq.req_notify()

    def poll(self) -> Sequence[vb.Completion]:
        return [
            vb.Completion(wc.wr_id, int(wc.status), wc.qp_num, wc.byte_len, wc.imm_data) for wc in self._cq.poll(POLL)
        ]

    def close(self) -> None:
        for region in self._regions:
            region.close()
        for part in (self._cq, self._channel, self._pd, self._context):
            part.close()


class IbverbsQueuePair:
    def __init__(self, qp: ib.QP) -> None:
        self._qp = qp
        self._receive = ib.RecvWR(wr_id=vb.RECEIVE)

    @property
    def number(self) -> int:
        return self._qp.qp_num

    def connect(self, path: vb.Path) -> None:
        mask = ib.QPAttrMask
        self._qp.to_init(path.port, vb.ACCESS)
        route = ib.AHAttr(
            dgid=path.peer_gid,
            sgid_index=path.gid_index,
            dlid=path.peer_lid,
            is_global=int(path.routed),
            port_num=path.port,
            hop_limit=vb.HOP_LIMIT,
        )
        # Not to_rtr(): it has no way to leave the global route out, as InfiniBand within a subnet does.
        self._qp.modify(
            mask.STATE
            | mask.AV
            | mask.PATH_MTU
            | mask.DEST_QPN
            | mask.RQ_PSN
            | mask.MAX_DEST_RD_ATOMIC
            | mask.MIN_RNR_TIMER,
            ah_attr=route,
            qp_state=ib.QPState.RTR,
            path_mtu=path.mtu,
            dest_qp_num=path.peer_queue_pair,
            rq_psn=path.peer_packet_number,
            max_dest_rd_atomic=1,
            min_rnr_timer=vb.RNR_TIMER,
        )
        self._qp.to_rts(path.packet_number, timeout=path.ack_timeout, retry_cnt=path.retries, rnr_retry=vb.RNR_RETRIES)

    def post_receives(self, count: int) -> None:
        self._qp.post_recv([self._receive] * count)

    def write(self, address: int, local_key: int, peer_address: int, peer_key: int) -> "IbverbsWrite":
        return IbverbsWrite(self._qp, address, local_key, peer_address, peer_key)

    def close(self) -> None:
        self._qp.close()


class IbverbsWrite:
    def __init__(self, qp: ib.QP, address: int, local_key: int, peer_address: int, peer_key: int) -> None:
        self._qp = qp
        self._address, self._local_key = address, local_key
        self._request = ib.SendWR(remote_addr=peer_address, rkey=peer_key)

    def post(self, num_bytes: int, immediate: int | None, request: int, signalled: bool) -> None:
        wr = self._request
        wr.sg_list = [ib.SGE(self._address, num_bytes, lkey=self._local_key)] if num_bytes else []
        wr.opcode = vb.WRITE if immediate is None else vb.WRITE_WITH_IMMEDIATE
        wr.imm_data = immediate or 0
        wr.wr_id = request
        wr.send_flags = vb.SIGNALLED if signalled else 0
        self._qp.post_send(wr)


BINDING: vb.Binding = IbverbsBinding()
