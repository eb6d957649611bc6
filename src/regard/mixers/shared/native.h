// What the compiled kernels share: tensors as they come, and the division of work among threads.
#pragma once

#include <algorithm>
#include <thread>
#include <vector>

extern "C" {

// (B, H, rows, width): strides of samples, heads and rows in numbers; a row is contiguous.
struct View {
    void* data;
    long batch, head, row;
};

}

namespace {

template <typename T>
struct Rows {
    T* first;
    long stride;
    Rows(const View& view, long b, long h)
        : first(static_cast<T*>(view.data) + b * view.batch + h * view.head), stride(view.row) {}
    T* operator()(long i) const { return first + i * stride; }
};

constexpr double WORTH = 1e7;  // products of numbers, about half a millisecond, that pay for the start of a thread

// Calls work(first, last) for parts of 0 ... count, which take about so many `products` in all: in up to `threads`
// threads, as far as that is worth their start.
template <typename Work>
void divide(long count, long threads, double products, Work work) {
    threads = std::max(1L, std::min({threads, count, long(std::min(products / WORTH, 1e6))}));
    std::vector<std::thread> others;
    auto part = [&](long number) { work(number * count / threads, (number + 1) * count / threads); };
    for (long number = 1; number < threads; ++number) others.emplace_back(part, number);
    part(0);
    for (auto& other : others) other.join();
}

}  // namespace
