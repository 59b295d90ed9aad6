"""A trained draft head: one Llama block that guesses the target's next token from what it thinks.

At a position it reads the embedding of the token there, and the last hidden state of the target one
position before; behind its first guess, its own. Its output layer is the rows of the target's for
the tokens that it knows. ``tools/train_head.py`` trains one; that of SmolLM2 lies beside this file.

The target's passes write the head's rows too, from what they know (``Session.follower``), so the
rows that the head guessed along are replaced in the pass that verifies them.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from memra_lowlevel import expect
from memra_lowlevel.cache import Cache, LayerPlan, ModelPlan, RowsAt
from memra_lowlevel.closing import Closing
from memra_lowlevel.errors import MemraError, ModelError
from memra_lowlevel.kernels import model as ops
from memra_lowlevel.kernels.model import TiledMatrix
from memra_lowlevel.runtime import Buffer, Stream
from memra_lowlevel.speculative import ChainIo, DraftChain, HiddenRows

from .generate import Session
from .model import Blocks, Layer, Model, Workspace
from .tiny import MADE_UP, made_up_head
from .weights import Tensor, Weights, as_tensor, read_stored, required_head_shapes

#: The head of SmolLM2-135M-Instruct.
SMOLLM2_HEAD = Path(__file__).with_name("smollm2-head.gguf")
ARCHITECTURE = "memra-draft-head"


def read_head(path: str | Path) -> tuple[str, dict[str, Tensor], np.ndarray]:
    """Name of the target, tensors and known tokens (ascending) of a head's file.

    Raises
    ------
    ModelError
        Not a readable GGUF file, or one of another kind.
    """
    path = Path(path)
    metadata, stored = read_stored(path, "A draft head is a file that tools/train_head.py wrote.")
    if metadata.get("general.architecture") != ARCHITECTURE:
        raise ModelError(
            f"{path}: the architecture is {metadata.get('general.architecture')!r}, a draft head's "
            f"is {ARCHITECTURE!r}; give a file that tools/train_head.py wrote"
        )
    tokens = [data for name, _, _, data in stored if name == "tokens"]
    if not tokens:
        raise ModelError(f"{path}: the tensor tokens is missing; the file is damaged")
    tensors = {
        name: as_tensor(path, name, format_, shape, data)
        for name, format_, shape, data in stored
        if name != "tokens"
    }
    return str(metadata.get("head.target", "")), tensors, np.asarray(tokens[0])


def _ascend(tokens: np.ndarray, n_vocab: int) -> bool:
    inside = tokens.size > 0 and tokens[0] >= 0 and tokens[-1] < n_vocab
    return bool(inside and (np.diff(tokens.astype(np.int64)) > 0).all())


class DraftHead(Blocks):
    """A head's weights on a device, with the table and the rotation of its target.

    Attributes
    ----------
    model : Model
        The target; it must outlive the head.
    features : TiledMatrix
        [width, width], what a hidden state is multiplied with.
    token_map : Buffer
        i32[n_vocab]: the target's token for each that the head knows.
    """

    def __init__(
        self,
        model: Model,
        stream: Stream,
        tensors: dict[str, Tensor],
        tokens: np.ndarray,
        *,
        name: str = "head",
    ):
        tokens, n_vocab = np.asarray(tokens), model.config.n_vocab
        ff = tensors["blk.0.ffn_gate.weight"].shape[0] if "blk.0.ffn_gate.weight" in tensors else 0
        config = replace(model.config, n_layers=1, n_ff=ff, n_vocab=tokens.size)
        for tensor, shape in required_head_shapes(config).items():
            if tensor not in tensors or tensors[tensor].shape != shape:
                got = tensors[tensor].shape if tensor in tensors else "missing"
                raise ModelError(
                    f"{name}: the tensor {tensor} is {got}, a head of {model.name} needs {shape}; "
                    "give the head that was trained for this model"
                )
        if tokens.dtype.kind not in "iu" or tokens.ndim != 1 or not _ascend(tokens, n_vocab):
            raise ModelError(
                f"{name}: its tokens, {tokens.dtype}{list(tokens.shape)}, must be ascending "
                f"numbers within the vocabulary of {n_vocab}; give the head that was trained for "
                "this model"
            )
        device, weights = model.device, Weights(name, config, tensors)
        self.model, self.device, self.config = model, device, config
        ops.prepare(device, {t.format for t in tensors.values() if len(t.shape) == 2})

        self.features = self._matrix(stream, tensors["features.weight"])
        self.layers = [Layer(device, stream, weights, 0)]
        self.output_norm = device.from_numpy(tensors["output_norm.weight"].rows, stream)
        source = model.weights.tensors.get("output.weight", model.weights["token_embd.weight"])
        shape = (tokens.size, config.width)
        words = Tensor("words", source.format, shape, source.rows[tokens])
        self.head = self._matrix(stream, words)
        self.token_map = device.from_numpy(np.asarray(tokens, np.int32), stream)
        self.angles, self.attend_kernel = model.angles, model.attend_kernel

    @classmethod
    def load(cls, model: Model, stream: Stream, path: str | Path | None = None) -> DraftHead:
        """Load the head of a model.

        Parameters
        ----------
        model : Model
        stream : Stream
            Weights are copied on it.
        path : path, optional
            A file of ``tools/train_head.py``; if left out, a made-up head for a made-up model, and
            that of SmolLM2 for others.

        Raises
        ------
        ModelError
            The file cannot be read, or was trained for another model.
        """
        if path is None and model.name in MADE_UP:
            return cls(model, stream, *made_up_head(model.config), name=f"the head of {model.name}")
        path = SMOLLM2_HEAD if path is None else path
        target, tensors, tokens = read_head(path)
        if target != model.name:
            raise ModelError(
                f"{path}: a head of {target!r} cannot draft for {model.name!r}; give one that was "
                "trained for it, or leave the model early (--drafter early-exit)"
            )
        return cls(model, stream, tensors, tokens, name=str(path))

    def _matrix(self, stream: Stream, tensor: Tensor) -> TiledMatrix:
        return TiledMatrix.upload(
            self.device, stream, np.ascontiguousarray(tensor.rows), tensor.format
        )

    def begin(
        self,
        stream: Stream,
        ws: Workspace,
        features: Buffer,
        hidden: HiddenRows,
        tokens: Buffer,
        positions: Buffer,
        n_rows: int,
    ) -> None:
        """Launch what comes before the block: embeddings, and the hidden states before them."""
        ops.embed_rows(stream, self.model.table, tokens, ws.h, n_rows)
        hidden.take(stream, positions, features, n_rows, programmatic=True)
        ops.add_product(stream, self.features, features, ws.h, n_rows, programmatic=True)


class HeadDrafter(Closing):
    """A head that drafts for a session, and follows its passes until it is closed.

    For another text rewind both: ``session.planes.set_len(stream, 0)`` and
    ``chain.rewind(stream, 0)``, then prime the session and ``chain.fill`` what it was primed with.

    Attributes
    ----------
    chain : DraftChain
    planes : Cache
        The head's one plane, as long as the session's.
    hidden : HiddenRows
    """

    def __init__(self, session: Session, head: DraftHead, stream: Stream, k_max: int):
        """Capture the head's step.

        Raises
        ------
        MemraError
            The head is of another model; the session has a follower or rows already, or takes fewer
            than ``k_max + 1`` rows at a time. Nothing was made then.
        """
        if head.model is not session.model:
            raise MemraError(
                f"HeadDrafter: the head is of {head.model.name!r}, the session of "
                f"{session.model.name!r}, or the model was loaded twice; load the head for the "
                "model of the session"
            )
        if session.follower is not None or session.planes.len:
            raise MemraError(
                "HeadDrafter: the session has a follower or holds rows already; make the drafter "
                "before the session is primed, and close the one before"
            )
        k_max = expect.integer("HeadDrafter: k_max", k_max)
        if not 1 <= k_max < session.ws.n_rows_max:
            raise MemraError(
                f"HeadDrafter: {k_max} drafts are verified with {k_max + 1} rows, the session "
                f"takes {session.ws.n_rows_max} at a time; draft 1 to "
                f"{session.ws.n_rows_max - 1}, or allocate it with a greater n_rows_max"
            )
        self.session, self.head = session, head
        self._made: list[Closing | Workspace] = []
        try:
            self._make(session, head, stream, k_max)
        except BaseException:
            self.close()
            raise
        session.follower = self

    def _make(self, session: Session, head: DraftHead, stream: Stream, k_max: int) -> None:
        device, config = head.device, head.config
        n_rows_max, capacity = session.ws.n_rows_max, session.planes.capacity
        layer: LayerPlan = session.model.config.plan.layers[0]
        self.planes = Cache(device, stream, ModelPlan((layer,)), capacity, name="head")
        self._made.append(self.planes)
        self.ws = head.workspace(n_rows_max)
        self._made.append(self.ws)
        self.hidden = HiddenRows(device, stream, capacity, config.width, eps=config.norm_eps)
        self._made.append(self.hidden)
        arena = device.arena(4 * n_rows_max * config.width + 256, name="head features")
        self._made.append(arena)
        shape = (n_rows_max, config.width)
        self.features: Buffer = arena.take(shape, np.float32, name="features")
        self.io = io = ChainIo(device, config.width, k_max, session.model.config.n_vocab)
        self._made.append(io)
        (plane,) = self.planes.planes()
        self._rows = RowsAt(plane, session.kv_layers[0].len_d)

        def step(stream: Stream) -> None:
            head.begin(stream, self.ws, self.features, self.hidden, io.tok_d, io.pos_d, 1)
            head.run(stream, self.ws, head.layers, [plane], 1, io.pos_d, programmatic=True)
            head.choose(stream, self.ws, 1, io.tok_d, programmatic=True)
            self.hidden.keep(stream, self.ws.h, io.pos_d, 1, block=io.block, programmatic=True)

        self.chain = DraftChain.capture(
            stream, step, io, self.planes, k_max, token_map=head.token_map,
            follows=session.planes, name="head",
        )  # fmt: skip
        self._made.append(self.chain)

    def follow(self, stream: Stream, ws: Workspace, tokens: Buffer, n_rows: int) -> None:
        """Keep the hidden states of a target's pass, and write the head's rows of its tokens."""
        at = self._rows.len_d
        self.hidden.keep(stream, ws.h, at, n_rows, programmatic=True)
        self.head.begin(stream, self.ws, self.features, self.hidden, tokens, at, n_rows)
        self.head.project(
            stream, self.ws, self.head.layers[0], self._rows, n_rows, at, programmatic=True
        )

    def close(self) -> None:
        """Let the session go, and give back what the drafter owns; the head stays. Idempotent."""
        if self.session.follower is self:
            self.session.follower = None
        for owned in reversed(self._made):
            owned.close()
