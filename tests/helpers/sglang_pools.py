"""Host pools as SGLang's look to a storage backend, without SGLang: the layouts of its MHA pool, one that shows no
ranges, one whose pages move, one without memory."""

import numpy as np
import torch

PAGE_SIZE, LAYERS, HEADS, DIM = 4, 3, 2, 8
LAYOUTS = ("page_first", "page_first_direct", "page_head", "layer_first")


class MhaPool:
    """`kv_buffer[0]` is K, `[1]` V; the page of slot i as in SGLang's pool_host/mha.py."""

    shared_allocation_domain = None

    def __init__(self, layout="page_first", num_pages=40, dtype=torch.bfloat16):
        self.layout, self.page_size, self.size, self.dtype = layout, PAGE_SIZE, num_pages * PAGE_SIZE, dtype
        self.head_num = HEADS
        dims = {
            "page_first": (2, self.size, LAYERS, HEADS, DIM),
            "page_first_direct": (2, num_pages, LAYERS, PAGE_SIZE, HEADS, DIM),
            "page_head": (2, num_pages, HEADS, PAGE_SIZE, LAYERS, DIM),
            "layer_first": (2, LAYERS, self.size, HEADS, DIM),
        }
        self.kv_buffer = torch.zeros(dims[layout], dtype=dtype)
        self.times_asked = 0

    def fill(self, seed):
        values = torch.from_numpy(np.random.default_rng(seed).integers(0, 256, self.kv_buffer.nbytes, dtype=np.uint8))
        self.kv_buffer.view(torch.uint8).view(-1).copy_(values)

    def page(self, slot):
        """The bytes of one page, in an order of their own for each layout."""
        return self.get_data_page(slot).contiguous().view(-1).view(torch.uint8).numpy().copy()

    def get_data_page(self, index, flat=True):
        if self.layout == "layer_first":
            page = self.kv_buffer[:, :, index : index + self.page_size]
        elif self.layout == "page_first":
            page = self.kv_buffer[:, index : index + self.page_size]
        else:
            page = self.kv_buffer[:, index // self.page_size]
        return page.flatten() if flat else page

    def set_from_flat_data_page(self, index, data_page):
        page = self.get_data_page(index, flat=False)
        page.copy_(data_page.reshape(page.shape))

    def get_page_buffer_meta(self, indices):
        self.times_asked += 1
        itemsize, base = self.dtype.itemsize, self.kv_buffer.data_ptr()
        token, half = HEADS * DIM * itemsize, self.kv_buffer.nbytes // 2
        addresses = []
        for slot in indices.tolist()[:: self.page_size]:
            if self.layout == "layer_first":
                for layer in range(LAYERS):
                    at = base + slot * token + layer * self.size * token
                    addresses += [at, at + half]
            else:
                at = base + slot * LAYERS * token
                addresses += [at, at + half]
        size = token * self.page_size * (1 if self.layout == "layer_first" else LAYERS)
        return addresses, [size] * len(addresses)

    def get_split_heads_page_buffer_meta(self, indices, split_factor):
        assert self.layout == "page_head"
        addresses, sizes = self.get_page_buffer_meta(indices)
        size = sizes[0] // split_factor
        cut = [
            at + part * size
            for k in range(0, len(addresses), 2)
            for part in range(split_factor)
            for at in addresses[k : k + 2]
        ]
        return cut, [size] * len(cut)


class FlatPool(MhaPool):
    """Shows no ranges, as SGLang's layer-first indexer does."""

    def get_page_buffer_meta(self, indices):
        raise ValueError("Unsupported layout")


class MovingPool(MhaPool):
    """One arena for several pools: page i lies where page `moved(i)` did."""

    shared_allocation_domain = object()

    def __init__(self):
        super().__init__()
        self.by_pages = 0

    def get_page_buffer_meta(self, indices):
        return super().get_page_buffer_meta((indices + self.by_pages * self.page_size) % self.size)


class ScatteredPool(MhaPool):
    """Each page in an allocation of its own."""

    def __init__(self):
        super().__init__()
        self.order = np.random.default_rng(0).permutation(self.size // self.page_size)

    def get_page_buffer_meta(self, indices):
        pages = self.order[indices.numpy()[:: self.page_size] // self.page_size]
        return super().get_page_buffer_meta(torch.from_numpy(np.repeat(pages * self.page_size, self.page_size)))


class LogicalPool:
    """Slots without memory."""

    page_size, size, kv_buffer, layout, dtype = PAGE_SIZE, 40 * PAGE_SIZE, None, "page_first", torch.uint8

    def get_page_buffer_meta(self, indices):
        return None


class ClosedPool(MhaPool):
    """Neither ranges nor flat pages, as SGLang's MXFP8 pool."""

    def get_page_buffer_meta(self, indices):
        raise NotImplementedError("no storage pages")

    def get_data_page(self, index, flat=True):
        raise NotImplementedError("no storage pages")


def slots_of(*pages):
    """int64 [n * page_size]: the slots of these pages."""
    return (np.array(pages)[:, None] * PAGE_SIZE + np.arange(PAGE_SIZE)).reshape(-1)


def hashes(count, first=0):
    """Of pages, as SGLang names them."""
    return [f"{number:064x}" for number in range(first, first + count)]
