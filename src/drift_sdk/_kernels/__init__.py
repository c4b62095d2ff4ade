"""Kernels of the executors, in Triton and CUDA C++, each with a checked wrapper.

Module layout
-------------
1. A docstring: what is computed (formula), the grid and which program owns what, bytes read and written, the
   order of summation where exactness rests on it, and the kernel's place in programmatic dependent launch
   (what it reads before it waits, see launch/kernel.py). A module of several kernels has these one after the
   other.
2. Kernels (`@kernel` of launch/kernel.py; the functions that they call: `@device_function`), with one
   argument a line and its shape. Only the module's wrappers launch them.
3. The wrappers: they check shapes, types and strides (launch/arguments.py), and launch. Outputs are tensors
   of the caller.

`<wrapper>_reference`, the same in plain torch, lies with the tests, in tests/support/references, in the
module with the name of the kernel's folder or module.

A kernel in CUDA C++ lies in a .cu file beside its wrapper, which declares with `note_kernel` what it reads
before it waits and what it writes. Each of its threads waits before it ends or permits dependents to start.

Letters of shapes
-----------------
R: rows of a step, a row being one token position. S: slots, rows of the slot tables. H: hidden size. V: size
of the vocabulary. Products: M rows times N columns of the weight, over an inner dimension of K.

Names inside kernels
--------------------
- `<tensor>_ptr`: a pointer: as an argument, to the tensor's first element. `<tensor>_ptrs`: a tile of
  pointers derived from it.
- `<tensor>_stride`: elements from one row of the tensor to the next. `<tensor>_<dimension>_stride`: the same
  for another dimension. Dimensions without a stride are contiguous.
- `<name>_offset`: a distance in elements, never in bytes, added to a pointer.
- `<name>_index`: the place of an entry in a list (of tiles, of slices), from 0. A bare noun (`row`, `column`,
  `head`, `slot`, `position`) is also such a number, or a tile of them.
- `<name>_mask`: a tile of booleans given to a load or a store: where it is false, memory is not touched.
  `is_<property>`: one property of elements (the row exists, the key is seen), of which masks are made.
- `num_<things>`, `NUM_<THINGS>`: a count. `first_<thing>`: the index of the first.
- `TILE_<DIMENSION>`, `BLOCK_<DIMENSION>`: how many entries of a dimension a program handles at once, a power
  of two. Tiles are those of products and of attention; kernels over rows, columns or tokens have blocks.
- `PADDED_<DIMENSION>`: the size of a whole dimension, rounded up to the power of two that `tl.arange` needs.
- `CHUNK_<THINGS>`: how many entries a loop takes at a time.
- `KV_BLOCK_SIZE`: token positions in a block of the KV cache.
- `GROUP_SIZE`: query heads that share one KV head (grouped-query attention).
- `NUM_STAGES`: depth of Triton's software pipeline. `PDL`: whether programmatic dependent launch is used.

A padding row has slot -1. The storage type is that of weights and activations (bfloat16, float16 or float32);
sums are float32.
"""
