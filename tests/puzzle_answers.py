"""Two other right ways to write each puzzle of nbs/scan/12b_triton_puzzles.ipynb.

The checks must accept them.
"""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import triton
import triton.language as tl


def power(n):
    return triton.next_power_of_2(n)


def side(n):
    return max(16, power(n))


@triton.jit
def indices(axis: tl.constexpr, BLOCK: tl.constexpr):
    "Return the indices of a program's block along an axis of the grid."
    return tl.program_id(axis) * BLOCK + tl.arange(0, BLOCK)


# 1: one program copies block after block; the last program takes the first block, in blocks of two


@triton.jit
def copy_loop_kernel(x_ptr, y_ptr, blocks, BLOCK: tl.constexpr):
    for p in range(blocks):
        i = p * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + i)
        tl.store(y_ptr + i, x)


def copy_loop(x, y):
    copy_loop_kernel[(1,)](x, y, len(x) // 4, BLOCK=4)


@triton.jit
def copy_backwards_kernel(x_ptr, y_ptr, BLOCK: tl.constexpr):
    last = tl.num_programs(0) - 1
    block = last - tl.program_id(0)
    offsets = block * BLOCK + tl.arange(0, BLOCK)
    i = tl.max_contiguous(offsets, BLOCK)
    x = tl.load(x_ptr + i)
    tl.store(y_ptr + i, x)


def copy_backwards(x, y):
    def grid(meta):
        return (len(x) // meta["BLOCK"],)

    copy_backwards_kernel[grid](x, y, BLOCK=2)


# 2: tl.sigmoid in blocks of 16; one program per element, without blocks


@triton.jit
def sigmoid_kernel(b_ptr, beta_ptr, n, BLOCK: tl.constexpr):
    i = indices(0, BLOCK)
    inside = i < n
    b = tl.load(b_ptr + i, inside)
    tl.store(beta_ptr + i, tl.sigmoid(b), inside)


def sigmoid_16(b, beta):
    grid = (triton.cdiv(b.numel(), 16),)
    sigmoid_kernel[grid](b, beta, b.numel(), BLOCK=16)


@triton.jit
def sigmoid_single_kernel(b_ptr, beta_ptr):
    p = tl.program_id(0)
    b = tl.load(b_ptr + p)
    e = tl.exp(b)
    beta = e / (1 + e)
    tl.store(beta_ptr + p, beta)


def sigmoid_single(b, beta):
    sigmoid_single_kernel[(len(b),)](b, beta)


# 3: a grid with one axis over the elements of S; one program per row


@triton.jit
def write_flat_kernel(x_ptr, k_ptr, S_ptr, size, N, BLOCK: tl.constexpr):
    i = indices(0, BLOCK)
    x = tl.load(x_ptr + i // N, mask=i < size, other=0.0)
    k = tl.load(k_ptr + i % N, mask=i < size, other=0.0)
    tl.store(S_ptr + i, x * k, mask=i < size)


def write_flat(x, k, S):
    grid = (triton.cdiv(S.numel(), 8),)
    write_flat_kernel[grid](x, k, S, S.numel(), S.shape[1], BLOCK=8)


@triton.jit
def write_row_kernel(x_ptr, k_ptr, S_ptr, N, NP: tl.constexpr):
    d = tl.program_id(0)
    n = tl.arange(0, NP)
    x = tl.load(x_ptr + d)
    k = tl.load(k_ptr + n, n < N, 0.0)
    tl.store(S_ptr + d * N + n, x * k, n < N)


def write_row(x, k, S):
    write_row_kernel[S.shape[:1]](x, k, S, len(k), NP=power(len(k)))


# 4: a tile of rows and columns; pointers that move along a row


@triton.jit
def gate_tile_kernel(x_ptr, z_ptr, out_ptr, x_stride, z_stride, T, D, BLOCK: tl.constexpr):
    t = indices(1, BLOCK)[:, None]
    d = indices(0, BLOCK)[None, :]
    inside = (t < T) & (d < D)
    x = tl.load(x_ptr + t * x_stride + d, mask=inside, other=0.0)
    z = tl.load(z_ptr + t * z_stride + d, mask=inside, other=0.0)
    gated = x * z * tl.sigmoid(z)
    tl.store(out_ptr + t * D + d, gated, mask=inside)


def gate_tile(x, z, out):
    T, D = x.shape
    grid = (triton.cdiv(D, 2), triton.cdiv(T, 2))
    gate_tile_kernel[grid](x, z, out, x.stride(0), z.stride(0), T, D, BLOCK=2)


@triton.jit
def gate_row_kernel(x_ptr, z_ptr, out_ptr, x_stride, z_stride, D, BLOCK: tl.constexpr):
    x_ptr += tl.program_id(0) * x_stride
    z_ptr += tl.program_id(0) * z_stride
    out_ptr += tl.program_id(0) * D
    for first in range(0, D, BLOCK):
        d = first + tl.arange(0, BLOCK)
        z = tl.load(z_ptr + d, mask=d < D)
        x = tl.load(x_ptr + d, mask=d < D)
        gated = x * z / (1 + tl.exp(-z))
        tl.store(out_ptr + d, gated, mask=d < D)


def gate_row(x, z, out):
    T, D = x.shape
    gate_row_kernel[(T,)](x, z, out, x.stride(0), z.stride(0), D, BLOCK=8)


# 5: a loop over columns with one number of the query at a time; a transposed tile


@triton.jit
def read_loop_kernel(S_ptr, q_ptr, y_ptr, D, N, BLOCK: tl.constexpr):
    d = indices(0, BLOCK)
    y = tl.zeros([BLOCK], tl.float32)
    for n in range(N):
        S = tl.load(S_ptr + d * N + n, mask=d < D, other=0.0)
        q = tl.load(q_ptr + n)
        y += S * q
    tl.store(y_ptr + d, y, mask=d < D)


def read_loop(S, q, y):
    grid = (triton.cdiv(len(S), 8),)
    read_loop_kernel[grid](S, q, y, *S.shape, BLOCK=8)


@triton.jit
def read_transposed_kernel(S_ptr, q_ptr, y_ptr, D, N, BLOCK: tl.constexpr, NP: tl.constexpr):
    d = indices(0, BLOCK)[None, :]
    n = tl.arange(0, NP)[:, None]
    inside = (d < D) & (n < N)
    S = tl.load(S_ptr + d * N + n, mask=inside)
    q = tl.load(q_ptr + n, mask=n < N)
    products = tl.where(inside, S * q, 0.0)
    y = tl.sum(products, 0, keep_dims=True)
    tl.store(y_ptr + d, y, mask=d < D)


def read_transposed(S, q, y):
    D, N = S.shape
    grid = (triton.cdiv(D, 4),)
    read_transposed_kernel[grid](S, q, y, D, N, BLOCK=4, NP=power(N))


# 6: tl.cumsum over a tile with all steps; moving pointers


@triton.jit
def running_sum_tile_kernel(x_ptr, y_ptr, T, D, TP: tl.constexpr, BLOCK: tl.constexpr):
    t = tl.arange(0, TP)[:, None]
    d = indices(0, BLOCK)[None, :]
    inside = (t < T) & (d < D)
    x = tl.load(x_ptr + t * D + d, mask=inside, other=0.0)
    y = tl.cumsum(x, 0)
    tl.store(y_ptr + t * D + d, y, mask=inside)


def running_sum_tile(x, y):
    T, D = x.shape
    grid = (triton.cdiv(D, 2),)
    running_sum_tile_kernel[grid](x, y, T, D, TP=power(T), BLOCK=2)


@triton.jit
def running_sum_pointer_kernel(x_ptr, y_ptr, T, D, BLOCK: tl.constexpr):
    d = indices(0, BLOCK)
    x_row = x_ptr + d
    y_row = y_ptr + d
    s = tl.full([BLOCK], 0.0, tl.float32)
    for _ in tl.range(0, T):
        s = s + tl.load(x_row, mask=d < D)
        tl.store(y_row, s, mask=d < D)
        x_row += D
        y_row += D


def running_sum_pointer(x, y):
    grid = (triton.cdiv(x.shape[1], 16),)
    running_sum_pointer_kernel[grid](x, y, *x.shape, BLOCK=16)


# 7 and 13: an associative scan that starts from the state; one program per channel, with and
# without a loop


@triton.jit
def later(a1, u1, a2, u2):
    return a1 * a2, a2 * u1 + u2


@triton.jit
def decay_tree_kernel(a_ptr, u_ptr, s0_ptr, y_ptr, T, D, TP: tl.constexpr, BLOCK: tl.constexpr):
    t = tl.arange(0, TP)[:, None]
    d = indices(0, BLOCK)[None, :]
    inside = (t < T) & (d < D)
    a = tl.load(a_ptr + t * D + d, mask=inside, other=1.0)
    u = tl.load(u_ptr + t * D + d, mask=inside, other=0.0)
    s0 = tl.load(s0_ptr + d, mask=d < D, other=0.0)
    u = tl.where(t == 0, a * s0 + u, u)
    _, y = tl.associative_scan((a, u), 0, later)
    tl.store(y_ptr + t * D + d, y, mask=inside)


def decay_tree(a, u, s0, y):
    T, D = a.shape
    grid = (triton.cdiv(D, 2),)
    decay_tree_kernel[grid](a, u, s0, y, T, D, TP=power(T), BLOCK=2)


@triton.jit
def decay_single_kernel(a_ptr, u_ptr, s0_ptr, y_ptr, T, D):
    d = tl.program_id(0)
    s = tl.load(s0_ptr + d)
    for i in range(T):
        a = tl.load(a_ptr + i * D + d)
        u = tl.load(u_ptr + i * D + d)
        s = tl.fma(a, s, u)
        tl.store(y_ptr + i * D + d, s)


def decay_single(a, u, s0, y):
    decay_single_kernel[(a.shape[1],)](a, u, s0, y, *a.shape)


@triton.jit
def tree_column_kernel(a_ptr, u_ptr, s0_ptr, y_ptr, T, D, TP: tl.constexpr):
    d = tl.program_id(0)
    t = tl.arange(0, TP)
    a = tl.load(a_ptr + t * D + d, mask=t < T, other=1.0)
    u = tl.load(u_ptr + t * D + d, mask=t < T, other=0.0)
    decay, y = tl.associative_scan((a, u), 0, later)
    start = tl.load(s0_ptr + d)
    tl.store(y_ptr + t * D + d, y + decay * start, mask=t < T)


def tree_column(a, u, s0, y):
    T, D = a.shape
    tree_column_kernel[(D,)](a, u, s0, y, T, D, TP=power(T))


# 8: one program per column; parts that PyTorch adds


@triton.jit
def column_kernel(S_ptr, dy_ptr, dq_ptr, D, N, BLOCK: tl.constexpr):
    n = tl.program_id(0)
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(0, D, BLOCK):
        d = first + tl.arange(0, BLOCK)
        S = tl.load(S_ptr + d * N + n, mask=d < D, other=0.0)
        dy = tl.load(dy_ptr + d, mask=d < D, other=0.0)
        total += S * dy
    dq = tl.sum(total, 0)
    tl.store(dq_ptr + n, dq)


def gradient_by_columns(S, dy, dq):
    D, N = S.shape
    column_kernel[(N,)](S, dy, dq, D, N, BLOCK=4)


@triton.jit
def product_kernel(S_ptr, dy_ptr, parts_ptr, N, NP: tl.constexpr):
    d = tl.program_id(0)
    n = tl.arange(0, NP)
    S = tl.load(S_ptr + d * N + n, mask=n < N, other=0.0)
    dy = tl.load(dy_ptr + d)
    tl.store(parts_ptr + d * N + n, S * dy, mask=n < N)


@triton.jit
def sum_rows_kernel(parts_ptr, dq_ptr, D, N, DP: tl.constexpr, NP: tl.constexpr):
    d = tl.arange(0, DP)[:, None]
    n = tl.arange(0, NP)
    columns = (n < N)[None, :]
    inside = (d < D) & columns
    parts = tl.load(parts_ptr + d * N + n[None, :], mask=inside, other=0.0)
    dq = tl.sum(parts, 0)
    tl.store(dq_ptr + n, dq, mask=n < N)


def gradient_by_products(S, dy, dq):
    D, N = S.shape
    parts = torch.empty_like(S)
    product_kernel[(D,)](S, dy, parts, N, NP=power(N))
    sum_rows_kernel[(1,)](parts, dq, D, N, DP=power(D), NP=power(N))


# 9: a grid over tiles of the scores; keys loaded as a transposed tile


@triton.jit
def scores_tile_kernel(q_ptr, k_ptr, A_ptr, M, T, N, NP: tl.constexpr, BLOCK: tl.constexpr):
    m = indices(0, BLOCK)[:, None]
    t = indices(1, BLOCK)[None, :]
    n = tl.arange(0, NP)
    q_inside = (m < M) & (n < N)[None, :]
    q = tl.load(q_ptr + m * N + n[None, :], mask=q_inside, other=0.0)
    k_inside = (t < T) & (n < N)[:, None]
    k = tl.load(k_ptr + t * N + n[:, None], mask=k_inside, other=0.0)
    A = tl.dot(q, k, input_precision="ieee")
    inside = (m < M) & (t < T)
    tl.store(A_ptr + m * T + t, A, mask=inside)


def scores_tile(q, k, A):
    M, N = q.shape
    T = len(k)
    grid = (triton.cdiv(M, 16), triton.cdiv(T, 16))
    scores_tile_kernel[grid](q, k, A, M, T, N, NP=side(N), BLOCK=16)


@triton.jit
def scores_row_kernel(q_ptr, k_ptr, A_ptr, T, N, TP: tl.constexpr, NP: tl.constexpr):
    m = tl.program_id(0)
    t = tl.arange(0, TP)
    n = tl.arange(0, NP)
    q = tl.load(q_ptr + m * N + n, mask=n < N, other=0.0)
    rows = (t < T)[:, None]
    columns = (n < N)[None, :]
    inside = rows & columns
    start = k_ptr + t[:, None] * N
    k = tl.load(start + n[None, :], mask=inside, other=0.0)
    products = k * q[None, :]
    A = tl.sum(products, 1)
    tl.store(A_ptr + m * T + t, A, mask=t < T)


def scores_row(q, k, A):
    M, N = q.shape
    T = len(k)
    scores_row_kernel[(M,)](q, k, A, T, N, TP=power(T), NP=power(N))


# 10: the full inner dimension at once, in three TF32 products; the sum added outside tl.dot


@triton.jit
def tile_of(ptr, i, j, rows, columns):
    inside_rows = (i < rows)[:, None]
    inside_columns = (j < columns)[None, :]
    inside = inside_rows & inside_columns
    row = ptr + i[:, None] * columns
    return tl.load(row + j[None, :], mask=inside, other=0.0)


@triton.jit
def put_tile(ptr, tile, i, j, rows, columns):
    inside_rows = (i < rows)[:, None]
    inside_columns = (j < columns)[None, :]
    inside = inside_rows & inside_columns
    row = ptr + i[:, None] * columns
    tl.store(row + j[None, :], tile, mask=inside)


@triton.jit
def project_whole_kernel(x_ptr, W_ptr, y_ptr, T, M, D, MP: tl.constexpr, BLOCK: tl.constexpr):
    t = indices(0, BLOCK)
    d = indices(1, BLOCK)
    m = tl.arange(0, MP)
    x = tile_of(x_ptr, t, m, T, M)
    W = tile_of(W_ptr, m, d, M, D)
    put_tile(y_ptr, tl.dot(x, W, input_precision="tf32x3"), t, d, T, D)


def project_whole(x, W, y):
    T, M = x.shape
    D = W.shape[1]
    grid = (triton.cdiv(T, 16), triton.cdiv(D, 16))
    project_whole_kernel[grid](x, W, y, T, M, D, MP=side(M), BLOCK=16)


@triton.jit
def project_flat_kernel(x_ptr, W_ptr, y_ptr, T, M, D, BLOCK: tl.constexpr, INNER: tl.constexpr):
    columns = tl.cdiv(D, BLOCK)
    t = tl.program_id(0) // columns * BLOCK + tl.arange(0, BLOCK)
    d = tl.program_id(0) % columns * BLOCK + tl.arange(0, BLOCK)
    y = tl.zeros([BLOCK, BLOCK], tl.float32)
    for i in range(tl.cdiv(M, INNER)):
        m = i * INNER + tl.arange(0, INNER)
        W = tile_of(W_ptr, m, d, M, D)
        y += tl.dot(tile_of(x_ptr, t, m, T, M), W, input_precision="ieee")
    put_tile(y_ptr, y, t, d, T, D)


def project_flat(x, W, y):
    T, M = x.shape
    D = W.shape[1]
    grid = (triton.cdiv(T, 8) * triton.cdiv(D, 8),)
    project_flat_kernel[grid](x, W, y, T, M, D, BLOCK=8, INNER=16)


# 11: one program per row, with only the keys up to the row; a state that moves through the tokens


@triton.jit
def causal_row_kernel(
    q_ptr, k_ptr, x_ptr, y_ptr, N, D, TP: tl.constexpr, NP: tl.constexpr, DP: tl.constexpr
):
    t = tl.program_id(0)
    s = tl.arange(0, TP)
    n = tl.arange(0, NP)
    d = tl.arange(0, DP)
    q = tl.load(q_ptr + t * N + n, mask=n < N, other=0.0)
    keys = tile_of(k_ptr, s, n, t + 1, N)
    A = tl.sum(keys * q[None, :], 1)
    values = tile_of(x_ptr, s, d, t + 1, D)
    y = tl.sum(A[:, None] * values, 0)
    tl.store(y_ptr + t * D + d, y, mask=d < D)


def causal_row(q, k, x, y):
    T, N = k.shape
    D = x.shape[1]
    causal_row_kernel[(T,)](q, k, x, y, N, D, TP=power(T), NP=power(N), DP=power(D))


@triton.jit
def causal_state_kernel(q_ptr, k_ptr, x_ptr, y_ptr, T, N, D, NP: tl.constexpr):
    d = tl.program_id(0)
    n = tl.arange(0, NP)
    S = tl.zeros([NP], tl.float32)
    for t in range(T):
        k = tl.load(k_ptr + t * N + n, mask=n < N, other=0.0)
        q = tl.load(q_ptr + t * N + n, mask=n < N, other=0.0)
        x = tl.load(x_ptr + t * D + d)
        S += k * x
        y = tl.sum(S * q, 0)
        tl.store(y_ptr + t * D + d, y)


def causal_state(q, k, x, y):
    T, N = k.shape
    D = x.shape[1]
    causal_state_kernel[(D,)](q, k, x, y, T, N, D, NP=power(N))


# 12: the state as (D, N), in chunks of 32; one causal product over the whole sequence


@triton.jit
def linear_rows_kernel(
    q_ptr, k_ptr, x_ptr, y_ptr, T, N, D, C: tl.constexpr, NP: tl.constexpr, DP: tl.constexpr
):
    n = tl.arange(0, NP)
    d = tl.arange(0, DP)
    c = tl.arange(0, C)
    S = tl.zeros([DP, NP], tl.float32)
    for chunk in range(tl.cdiv(T, C)):
        q = tile_of(q_ptr, chunk * C + c, n, T, N)
        k = tile_of(k_ptr, chunk * C + c, n, T, N)
        x = tile_of(x_ptr, chunk * C + c, d, T, D)
        A = tl.dot(q, k.T, input_precision="ieee")
        later_column = c[:, None] < c[None, :]
        A = tl.where(later_column, 0.0, A)
        within = tl.dot(A, x, input_precision="ieee")
        before = tl.dot(q, S.T, input_precision="ieee")
        y = within + before
        put_tile(y_ptr, y, chunk * C + c, d, T, D)
        S += tl.dot(x.T, k, input_precision="ieee")


def linear_rows(q, k, x, y):
    T, N = k.shape
    D = x.shape[1]
    linear_rows_kernel[(1,)](q, k, x, y, T, N, D, C=32, NP=side(N), DP=side(D))


@triton.jit
def linear_whole_kernel(
    q_ptr, k_ptr, x_ptr, y_ptr, T, N, D, TP: tl.constexpr, NP: tl.constexpr, DP: tl.constexpr
):
    t = tl.arange(0, TP)
    n = tl.arange(0, NP)
    d = indices(0, DP)
    A = tl.dot(
        tile_of(q_ptr, t, n, T, N), tl.trans(tile_of(k_ptr, t, n, T, N)), input_precision="ieee"
    )
    earlier = t[:, None] >= t[None, :]
    A = tl.where(earlier, A, 0.0)
    y = tl.dot(A, tile_of(x_ptr, t, d, T, D), input_precision="ieee")
    put_tile(y_ptr, y, t, d, T, D)


def linear_whole(q, k, x, y):
    T, N = k.shape
    D = x.shape[1]
    grid = (triton.cdiv(D, 16),)
    linear_whole_kernel[grid](q, k, x, y, T, N, D, TP=side(T), NP=side(N), DP=16)


# 14: segments summed by a tree, padded to eight steps; one program per channel


@triton.jit
def segment_tree_kernel(
    a_ptr, u_ptr, P_ptr, R_ptr, T, D, L: tl.constexpr, LP: tl.constexpr, BLOCK: tl.constexpr
):
    step = tl.arange(0, LP)
    t = tl.program_id(0) * L + step
    d = indices(1, BLOCK)
    rows = ((step < L) & (t < T))[:, None]
    columns = (d < D)[None, :]
    inside = rows & columns
    at = t[:, None] * D + d[None, :]
    a = tl.load(a_ptr + at, mask=inside, other=1.0)
    u = tl.load(u_ptr + at, mask=inside, other=0.0)
    P, R = tl.associative_scan((a, u), 0, later)
    last = (step == LP - 1)[:, None]
    at = tl.program_id(0) * D + d
    P_last = tl.sum(tl.where(last, P, 0.0), 0)
    tl.store(P_ptr + at, P_last, mask=d < D)
    R_last = tl.sum(tl.where(last, R, 0.0), 0)
    tl.store(R_ptr + at, R_last, mask=d < D)


def ends_by_trees(a, u, s0, ends):
    T, D = a.shape
    G = triton.cdiv(T, 5)
    P, R = torch.empty(2, G, D, device=a.device)
    segment_tree_kernel[(G, triton.cdiv(D, 2))](a, u, P, R, T, D, L=5, LP=8, BLOCK=2)
    decay_tree(P, R, s0, ends)


@triton.jit
def segment_channel_kernel(a_ptr, u_ptr, P_ptr, R_ptr, T, D, L: tl.constexpr):
    g = tl.program_id(1)
    d = tl.program_id(0)
    P = tl.full([], 1.0, tl.float32)
    R = tl.full([], 0.0, tl.float32)
    end = tl.minimum(g * L + L, T)
    for t in range(g * L, end):
        a = tl.load(a_ptr + t * D + d)
        P *= a
        u = tl.load(u_ptr + t * D + d)
        R = a * R + u
    tl.store(P_ptr + g * D + d, P)
    tl.store(R_ptr + g * D + d, R)


def ends_by_channels(a, u, s0, ends):
    T, D = a.shape
    G = triton.cdiv(T, 5)
    P = torch.empty_like(ends)
    R = torch.empty_like(ends)
    segment_channel_kernel[(D, G)](a, u, P, R, T, D, L=5)
    decay_single(P, R, s0, ends)


# 15: each row from the rows before it; Λ as a tile, columns by squeezing


@triton.jit
def substitute_rows_kernel(L_ptr, R_ptr, U_ptr, T, D, TP: tl.constexpr, BLOCK: tl.constexpr):
    s = tl.arange(0, TP)
    d = indices(0, BLOCK)
    U = tl.zeros([TP, BLOCK], tl.float32)
    for t in range(T):
        row = tl.load(L_ptr + t * T + s, mask=s < t, other=0.0)
        r = tl.load(R_ptr + t * D + d, mask=d < D, other=0.0)
        done = tl.sum(row[:, None] * U, 0)
        u = r - done
        here = (s == t)[:, None]
        U = tl.where(here, u[None, :], U)
        tl.store(U_ptr + t * D + d, u, mask=d < D)


def substitute_rows(L, R, U):
    T, D = R.shape
    grid = (triton.cdiv(D, 2),)
    substitute_rows_kernel[grid](L, R, U, T, D, TP=power(T), BLOCK=2)


@triton.jit
def substitute_tile_kernel(L_ptr, R_ptr, U_ptr, T, D, TP: tl.constexpr, DP: tl.constexpr):
    t = tl.arange(0, TP)
    d = tl.arange(0, DP)
    below = t[:, None] > t[None, :]
    tile = tile_of(L_ptr, t, t, T, T)
    L = tl.where(below, tile, 0.0)
    U = tile_of(R_ptr, t, d, T, D)
    for s in range(T - 1):
        here = (t == s)[None, :]
        column = tl.sum(tl.where(here, L, 0.0), 1)
        here = (t == s)[:, None]
        row = tl.sum(tl.where(here, U, 0.0), 0)
        U -= column[:, None] * row[None, :]
    put_tile(U_ptr, U, t, d, T, D)


def substitute_tile(L, R, U):
    T, D = R.shape
    substitute_tile_kernel[(1,)](L, R, U, T, D, TP=power(T), DP=power(D))


# 16: the residual form on a transposed tile; beta instead of the logit, a program per channel


@triton.jit
def residual_kernel(k_ptr, x_ptr, b_ptr, S_ptr, T, D, N, BLOCK: tl.constexpr, NP: tl.constexpr):
    d = tl.arange(0, BLOCK)[None, :]
    n = tl.arange(0, NP)[:, None]
    S = tl.zeros([NP, BLOCK], tl.float32)
    for t in range(0, T):
        k = tl.load(k_ptr + t * N + n, mask=n < N, other=0.0)
        x = tl.load(x_ptr + t * D + d, mask=d < D)
        v = tl.load(b_ptr + t * D + d, mask=d < D)
        length = tl.sum(k * k, 0)[None, :]
        eps = k / (1.0 + length + tl.exp(-v))
        error = x - k * S
        S += eps * error
    inside = (d < D) & (n < N)
    tl.store(S_ptr + d * N + n, S, mask=inside)


def last_state_residual(k, x, b, S):
    D, N = S.shape
    T = len(k)
    residual_kernel[(1,)](k, x, b, S, T, D, N, BLOCK=power(D), NP=power(N))


@triton.jit
def beta_kernel(k_ptr, x_ptr, b_ptr, S_ptr, T, D, N: tl.constexpr, NP: tl.constexpr):
    d = tl.program_id(0)
    n = tl.arange(0, NP)
    S = tl.zeros([NP], tl.float32)
    for t in range(T):
        k = tl.load(k_ptr + t * N + n, mask=n < N, other=0.0)
        b = tl.load(b_ptr + t * D + d)
        beta = tl.sigmoid(b)
        length = tl.sum(k * k)
        eps = beta / (1 + beta * length)
        forgotten = eps * k * k * S
        x = tl.load(x_ptr + t * D + d)
        S = S - forgotten + eps * x * k
    tl.store(S_ptr + d * N + n, S, mask=n < N)


def last_state_beta(k, x, b, S):
    D, N = S.shape
    beta_kernel[(D,)](k, x, b, S, len(k), D, N=N, NP=power(N))


# 17: a grid with one axis and a helper; all channels of a batch element in one program, moving
# pointers


@triton.jit
def row_of(pointer, row, width, i):
    return tl.load(pointer + row * width + i, mask=i < width, other=0.0)


@triton.jit
def forward_flat_kernel(
    q_ptr, k_ptr, x_ptr, b_ptr, skip_ptr, z_ptr, out_ptr, T, D, N,
    BLOCK: tl.constexpr, NP: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(D, BLOCK)
    batch = tl.program_id(0) // blocks
    d = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    n = tl.arange(0, NP)
    S = tl.zeros([NP, BLOCK], tl.float32)
    for row in range(batch * T, batch * T + T):
        k = row_of(k_ptr, row, N, n)[:, None]
        q = row_of(q_ptr, row, N, n)[:, None]
        x = row_of(x_ptr, row, D, d)
        z = row_of(z_ptr, row, D, d)
        length = tl.sum(k * k, 0)
        b = row_of(b_ptr, row, D, d)
        eps = 1.0 / (1.0 + length + tl.exp(-b))
        error = x[None, :] - k * S
        S += k * eps[None, :] * error
        skip = tl.load(skip_ptr + d, d < D, 0.0)
        y = tl.sum(q * S, 0) + skip * x
        gated = y * z * tl.sigmoid(z)
        tl.store(out_ptr + row * D + d, gated, mask=d < D)


def forward_flat(q, k, x, b, D_skip, z, out):
    B, T, D = x.shape
    N = k.shape[-1]
    grid = (B * triton.cdiv(D, 8),)
    forward_flat_kernel[grid](q, k, x, b, D_skip, z, out, T, D, N, BLOCK=8, NP=power(N))


@triton.jit
def forward_wide_kernel(
    q_ptr, k_ptr, x_ptr, b_ptr, skip_ptr, z_ptr, out_ptr, T, D, N,
    DP: tl.constexpr, NP: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * T
    d = tl.arange(0, DP)
    n = tl.arange(0, NP)
    x_ptr += first * D + d
    b_ptr += first * D + d
    z_ptr += first * D + d
    out_ptr += first * D + d
    k_ptr += first * N + n
    q_ptr += first * N + n
    S = tl.zeros([DP, NP], tl.float32)
    skip = tl.load(skip_ptr + d, mask=d < D)
    for t in range(T):
        k = tl.load(k_ptr + t * N, mask=n < N, other=0.0)
        q = tl.load(q_ptr + t * N, mask=n < N, other=0.0)
        x = tl.load(x_ptr + t * D, mask=d < D)
        z = tl.load(z_ptr + t * D, mask=d < D)
        b = tl.load(b_ptr + t * D, mask=d < D)
        beta = tl.sigmoid(b)
        length = tl.sum(k * k, 0)
        rate = (beta / (1.0 + beta * length))[:, None]
        kept = S * (1.0 - rate * k * k)
        S = kept + rate * x[:, None] * k
        y = tl.sum(S * q, 1) + skip * x
        gated = y * z * tl.sigmoid(z)
        tl.store(out_ptr + t * D, gated, mask=d < D)


def forward_wide(q, k, x, b, D_skip, z, out):
    B, T, D = x.shape
    N = k.shape[-1]
    forward_wide_kernel[(B,)](q, k, x, b, D_skip, z, out, T, D, N, DP=power(D), NP=power(N))


# 18: rows of U one by one, from a masked Gram matrix; the transposed state, all channels in one
# program


@triton.jit
def chunk_rows_kernel(
    q_ptr, k_ptr, x_ptr, b_ptr, S0_ptr, y_ptr, S_ptr, T, N, D,
    C: tl.constexpr, NP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    t = tl.arange(0, C)
    n = tl.arange(0, NP)
    d = indices(0, BLOCK)
    q = tile_of(q_ptr, t, n, T, N)
    k = tile_of(k_ptr, t, n, T, N)
    S = tile_of(S0_ptr, d, n, D, N)
    beta = tl.sigmoid(tile_of(b_ptr, t, d, T, D))
    length = tl.sum(k * k, 1)[:, None]
    eps = beta / (1.0 + beta * length)
    earlier = t[:, None] > t[None, :]
    inside = (t < T)[:, None]
    before = earlier & inside
    products = tl.dot(k, k.T, input_precision="ieee")
    gram = tl.where(before, products, 0.0)
    x = tile_of(x_ptr, t, d, T, D)
    read = tl.dot(k, S.T, input_precision="ieee")
    U = eps * (x - read)
    for s in tl.static_range(C):
        here = (t == s)[None, :]
        column = tl.sum(tl.where(here, gram, 0.0), 1)
        here = (t == s)[:, None]
        u = tl.sum(tl.where(here, U, 0.0), 0)
        share = eps * column[:, None] * u[None, :]
        U -= tl.where((t > s)[:, None], share, 0.0)
    bad = U != U - 0.0 * U  # infinite or NaN
    later_key = t[:, None] < t[None, :]
    products = tl.dot(q, k.T, input_precision="ieee")
    A = tl.where(later_key, 0.0, products)
    within = tl.dot(A, tl.where(bad, 0.0, U), input_precision="ieee")
    from_start = tl.dot(q, S.T, input_precision="ieee")
    y = tl.where(bad, float("nan"), within + from_start)
    put_tile(y_ptr, y, t, d, T, D)
    written = tl.dot(U.T, k, input_precision="ieee")
    put_tile(S_ptr, S + written, d, n, D, N)


def chunk_rows(q, k, x, b, S0, y, S):
    T, N = k.shape
    D = x.shape[1]
    grid = (triton.cdiv(D, 16),)
    chunk_rows_kernel[grid](q, k, x, b, S0, y, S, T, N, D, C=16, NP=side(N), BLOCK=16)


@triton.jit
def chunk_steps_kernel(
    q_ptr, k_ptr, x_ptr, b_ptr, S0_ptr, y_ptr, S_ptr, T, N, D,
    C: tl.constexpr, NP: tl.constexpr, DP: tl.constexpr,
):  # fmt: skip
    t = tl.arange(0, C)
    n = tl.arange(0, NP)
    d = tl.arange(0, DP)
    keys = tile_of(k_ptr, t, n, T, N)
    queries = tile_of(q_ptr, t, n, T, N)
    values = tile_of(x_ptr, t, d, T, D)
    logits = tile_of(b_ptr, t, d, T, D)
    S = tile_of(S0_ptr, d, n, D, N)
    Y = tl.zeros([C, DP], tl.float32)
    for s in range(T):
        now = (t == s)[:, None]
        k = tl.sum(tl.where(now, keys, 0.0), 0)
        q = tl.sum(tl.where(now, queries, 0.0), 0)
        x = tl.sum(tl.where(now, values, 0.0), 0)
        b = tl.sum(tl.where(now, logits, 0.0), 0)
        read = tl.sum(S * k[None, :], 1)
        error = x - read
        length = tl.sum(k * k, 0)
        eps = 1.0 / (1.0 + length + tl.exp(-b))
        write = (eps * error)[:, None]
        S += write * k[None, :]
        y = tl.sum(S * q[None, :], 1)[None, :]
        Y = tl.where(now, y, Y)
    put_tile(y_ptr, Y, t, d, T, D)
    put_tile(S_ptr, S, d, n, D, N)


def chunk_steps(q, k, x, b, S0, y, S):
    T, N = k.shape
    D = x.shape[1]
    chunk_steps_kernel[(1,)](q, k, x, b, S0, y, S, T, N, D, C=power(T), NP=power(N), DP=power(D))


# 19: a reversed tree whose steps carry the next decay; one program per channel, backwards by
# moving pointers


@triton.jit
def backward_tree_kernel(
    a_ptr, h_ptr, dy_ptr, da_ptr, du_ptr, T, D, TP: tl.constexpr, BLOCK: tl.constexpr
):
    t = tl.arange(0, TP)
    d = indices(0, BLOCK)
    after = tile_of(a_ptr, t + 1, d, T, D)
    dy = tile_of(dy_ptr, t, d, T, D)
    _, ds = tl.associative_scan((after, dy), 0, later, reverse=True)
    put_tile(da_ptr, ds * tile_of(h_ptr, t, d, T, D), t, d, T, D)
    put_tile(du_ptr, ds, t, d, T, D)


def backward_tree(a, h, dy, da, du):
    T, D = a.shape
    grid = (triton.cdiv(D, 2),)
    backward_tree_kernel[grid](a, h, dy, da, du, T, D, TP=power(T), BLOCK=2)


@triton.jit
def backward_channel_kernel(a_ptr, h_ptr, dy_ptr, da_ptr, du_ptr, T, D):
    at = (T - 1) * D + tl.program_id(0)
    ds = tl.load(dy_ptr + at)
    tl.store(du_ptr + at, ds)
    h = tl.load(h_ptr + at)
    tl.store(da_ptr + at, ds * h)
    for _ in range(T - 1):
        a = tl.load(a_ptr + at)
        ds = ds * a
        at -= D
        ds += tl.load(dy_ptr + at)
        tl.store(du_ptr + at, ds)
        h = tl.load(h_ptr + at)
        tl.store(da_ptr + at, ds * h)


def backward_channel(a, h, dy, da, du):
    backward_channel_kernel[(a.shape[1],)](a, h, dy, da, du, *a.shape)


ANSWERS = {
    1: (copy_loop, copy_backwards),
    2: (sigmoid_16, sigmoid_single),
    3: (write_flat, write_row),
    4: (gate_tile, gate_row),
    5: (read_loop, read_transposed),
    6: (running_sum_tile, running_sum_pointer),
    7: (decay_tree, decay_single),
    8: (gradient_by_columns, gradient_by_products),
    9: (scores_tile, scores_row),
    10: (project_whole, project_flat),
    11: (causal_row, causal_state),
    12: (linear_rows, linear_whole),
    13: (decay_tree, tree_column),
    14: (ends_by_trees, ends_by_channels),
    15: (substitute_rows, substitute_tile),
    16: (last_state_residual, last_state_beta),
    17: (forward_flat, forward_wide),
    18: (chunk_rows, chunk_steps),
    19: (backward_tree, backward_channel),
}
