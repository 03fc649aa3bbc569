// Four-bit products beside bf16 ones: right against sums in double precision, and how long they take. A program of its own: `four_bit check few|wide|f16`,
// `four_bit products ROWS ...`, `four_bit step ROWS ...`, `four_bit few|wide` (one launch of each, for a profiler).
//
// nvcc -O3 -std=c++17 -lineinfo -gencode=arch=compute_90a,code=sm_90a -cudart static -o four_bit four_bit.cu
#include <dlfcn.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "../gemm/four_bit_few.cuh"
#include "../gemm/four_bit_wide.cuh"
#include "../norm.cu"
using namespace pagedd;
#define CK(x) do { auto e_ = (x); if (int(e_) != 0) { printf("%s:%d %s: %d %s\n", __FILE__, __LINE__, #x, int(e_), cudaGetErrorString(cudaError_t(e_))); exit(1); } } while (0)

template <typename T, int C, int D, bool N, Ending E>
__global__ void __launch_bounds__(kFewThreads, 1) few(const __grid_constant__ FourBitFewParams p) { four_bit_few<T, C, D, N, E>(p); }
// Stands for a kernel of attention: CTAs of which the first `working` take a time, the others none. They let the next kernel start at once or as soon as they start.
__global__ void busy(int ns, unsigned working, int early) {
    extern __shared__ uint8_t room[];
    if (early) let_next_kernel_start();
    wait_for_previous_kernel();
    let_next_kernel_start();
    const long long end = clock64() + (blockIdx.x < working ? ns * 19 / 10 : 0);
    while (clock64() < end) {}
}
template <typename T, int G, int R, int S, Ending E>
__global__ void __launch_bounds__(kWideThreads<G>, kWideBlocks<G>) wide(const __grid_constant__ FourBitWideParams p) { four_bit_wide<T, G, R, S, E>(p); }
template <typename T, int A, int B, int S, Input I, Ending E>
__global__ void __launch_bounds__(kProductThreads, 1) dense(const __grid_constant__ SmallRowsParams p) { small_rows<T, A, B, S, I, E>(p); }
struct WidenParams { const void* w; void* out; uint32_t outputs, inputs, interleaved; };
template <typename T> __global__ void widen_all(const __grid_constant__ WidenParams p) { widen_four_bit<T>(p.w, p.out, p.outputs, p.inputs, p.interleaved); }
__global__ void __launch_bounds__(256) norm_early(const __grid_constant__ NormArgs a) { add_rms_norm<bf16>(a); }

static int sms = 132;
static cudaStream_t stream;
static bool pdl = true;
static decltype(&cuTensorMapEncodeTiled) encode;

template <class P> static void launch(void (*k)(P), dim3 grid, int threads, int shared, const P& p, bool early, int cluster = 1) {
    cudaLaunchConfig_t c = {};
    c.gridDim = grid; c.blockDim = threads; c.dynamicSmemBytes = shared; c.stream = stream;
    cudaLaunchAttribute at[2] = {};
    c.attrs = at;
    if (cluster > 1) { at[c.numAttrs].id = cudaLaunchAttributeClusterDimension; at[c.numAttrs].val.clusterDim.x = cluster; at[c.numAttrs].val.clusterDim.y = at[c.numAttrs].val.clusterDim.z = 1; ++c.numAttrs; }
    if (early) { at[c.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization; at[c.numAttrs].val.programmaticStreamSerializationAllowed = 1; ++c.numAttrs; }
    CK(cudaLaunchKernelEx(&c, k, p));
}

struct Call { const void* x; const float* norm; const void* w; void* out; int in, out_n, rows; };
struct Variant { std::string name; bool normed, is_wide; std::function<bool(int, int, int)> fits; std::function<void(const Call&)> run; };

// More than half of a multiprocessor's shared memory: no two blocks find room on one.
static constexpr uint32_t kAlone = 115968;
template <typename T, int C, int D, bool N, Ending E> static Variant few_variant() {
    auto k = few<T, C, D, N, E>;
    constexpr uint32_t most = 226 * 1024;
    CK(cudaFuncSetAttribute(k, cudaFuncAttributeMaxDynamicSharedMemorySize, most));
    const auto shared = [](int in, int out, int rows) { return four_bit_few_shared(in, out, rows, std::min(out / 16, sms), D, C); };
    char name[64]; snprintf(name, 64, "%c%d%s", C == 1 ? 'f' : 'g', D, N ? "n" : "");
    return {name, N, false, [=](int in, int out, int rows) { return rows <= 8 * C && (C == 1 || rows > 8) && shared(in, out, rows) <= most && (!N || (rows <= 2 && in <= 8192)); },
            [=](const Call& c) {
                FourBitFewParams p = {c.x, c.norm, c.w, c.out, uint32_t(c.in), uint32_t(c.out_n), uint32_t(c.rows), 1e-5f};
                const uint32_t bytes = shared(c.in, c.out_n, c.rows);
                launch(k, dim3(std::min(c.out_n / 16, sms)), kFewThreads, std::max(bytes, kAlone), p, pdl);
            }};
}
static CUtensorMap map_of(const void* x, int in, int rows, int box, bool half) {
    CUtensorMap m; cuuint64_t dims[2] = {cuuint64_t(in), cuuint64_t(rows)}, strides[1] = {cuuint64_t(in) * 2}; cuuint32_t b[2] = {64, cuuint32_t(box)}, one[2] = {1, 1};
    CK(encode(&m, half ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, const_cast<void*>(x), dims, strides, b, one, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE));
    return m;
}
template <typename T, int G, int R, int S, Ending E> static Variant wide_variant(int split) {
    auto k = wide<T, G, R, S, E>;
    using Shape = FourBitWideShape<G, R, S>;
    CK(cudaFuncSetAttribute(k, cudaFuncAttributeMaxDynamicSharedMemorySize, Shape::kSharedBytes));
    char name[64]; snprintf(name, 64, "w%d/%d", R, split);
    return {name, false, true, [=](int in, int, int) { return in / 64 >= split; }, [=](const Call& c) {
                FourBitWideParams p; memset(&p, 0, sizeof p);
                p.x = map_of(c.x, c.in, c.rows, R, !std::is_same<T, Bf16>::value); p.weights = c.w; p.out = c.out; p.inputs = c.in; p.outputs = c.out_n; p.rows = c.rows; p.row_blocks = (c.rows + R - 1) / R;
                launch(k, dim3((c.out_n + Shape::kOutputs - 1) / Shape::kOutputs * p.row_blocks * split), kWideThreads<G>, Shape::kSharedBytes, p, pdl, split);
            }};
}
template <int A, int B, int S, Input I, Ending E> static Variant dense_variant(const char* name) {
    auto k = dense<bf16, A, B, S, I, E>;
    CK(cudaFuncSetAttribute(k, cudaFuncAttributeMaxDynamicSharedMemorySize, 226 * 1024));
    return {name, I == Input::kNormed, false, [=](int in, int, int rows) { return rows <= B * 8 && (B == 1 || rows > 8) && SmallRowsShape<A, B, S, I>::shared_bytes(in, rows) <= 226 * 1024 && (I != Input::kNormed || rows <= 2); }, [=](const Call& c) {
                SmallRowsParams p = {c.x, c.norm, c.w, c.out, uint32_t(c.in), uint32_t(c.out_n), uint32_t(c.rows), 0, 1e-5f};
                const unsigned w = (E == Ending::kSilu ? 8 : 16) * A, width = E == Ending::kSilu ? p.outputs / 2 : p.outputs; p.tiles = (width + w - 1) / w;
                launch(k, dim3(std::min<unsigned>(p.tiles, sms)), kProductThreads, SmallRowsShape<A, B, S, I>::shared_bytes(c.in, c.rows), p, pdl);
            }};
}
template <typename T, Ending E> static std::vector<Variant> fews() {
    return {few_variant<T, 1, 4, false, E>(), few_variant<T, 1, 2, false, E>(), few_variant<T, 1, 4, true, E>(), few_variant<T, 2, 4, false, E>()};
}
template <typename T, Ending E> static std::vector<Variant> wides(int rows) {
    std::vector<Variant> v;
    for (int s : {1, 2, 4, 8}) {
        if (rows <= 16) v.push_back(wide_variant<T, 2, 16, 8, E>(s));
        if (rows <= 32) v.push_back(wide_variant<T, 2, 32, 6, E>(s));
        if (rows > 16 && rows <= 64) v.push_back(wide_variant<T, 3, 64, 10, E>(s));
        if (rows > 32) v.push_back(wide_variant<T, 3, 128, 8, E>(s));
    }
    return v;
}

// ---------- cuBLASLt by hand ----------
struct HeuristicResult { unsigned long long algo[8]; size_t workspace; int state; float waves; int reserved[4]; };
struct Lt {
    int (*create)(void**); int (*desc)(void**, int, int); int (*desc_set)(void*, int, const void*, size_t);
    int (*layout)(void**, int, uint64_t, uint64_t, int64_t); int (*pref)(void**); int (*pref_set)(void*, int, const void*, size_t);
    int (*heur)(void*, void*, void*, void*, void*, void*, void*, int, HeuristicResult*, int*);
    int (*matmul)(void*, void*, const void*, const void*, void*, const void*, void*, const void*, const void*, void*, void*, void*, const void*, void*, size_t, cudaStream_t);
    void* h = nullptr; void* ws; bool ok = false;
    Lt() {
        void* l = nullptr;
        for (const char* n : {"libcublasLt.so.13", "libcublasLt.so", "libcublasLt.so.12"}) if (!l) l = dlopen(n, RTLD_NOW | RTLD_GLOBAL);
        if (!l) { printf("no cublasLt: %s\n", dlerror()); return; }
        auto s = [&](const char* n) { return dlsym(l, n); };
        create = (decltype(create))s("cublasLtCreate"); desc = (decltype(desc))s("cublasLtMatmulDescCreate"); desc_set = (decltype(desc_set))s("cublasLtMatmulDescSetAttribute");
        layout = (decltype(layout))s("cublasLtMatrixLayoutCreate"); pref = (decltype(pref))s("cublasLtMatmulPreferenceCreate"); pref_set = (decltype(pref_set))s("cublasLtMatmulPreferenceSetAttribute");
        heur = (decltype(heur))s("cublasLtMatmulAlgoGetHeuristic"); matmul = (decltype(matmul))s("cublasLtMatmul");
        if (create(&h)) { printf("create failed\n"); return; }
        CK(cudaMalloc(&ws, 32 << 20)); ok = true;
    }
};
static Lt* lt;
struct LtPlan {
    void *d, *w, *x, *o; std::vector<HeuristicResult> algos;
    LtPlan(int inputs, int outputs, int rows, int in_type, int out_type) {
        lt->desc(&d, 68, 0); int one = 1; lt->desc_set(d, 3, &one, 4);
        lt->layout(&w, in_type, inputs, outputs, inputs); lt->layout(&x, in_type, inputs, rows, inputs); lt->layout(&o, out_type, outputs, rows, outputs);
        void* p; lt->pref(&p); uint64_t ws = 32 << 20; lt->pref_set(p, 1, &ws, 8);
        algos.resize(4); int n = 0; lt->heur(lt->h, d, w, x, o, o, p, 4, algos.data(), &n); algos.resize(n);
    }
    int run(int which, const void* wp, const void* xp, void* op) {
        float one = 1, zero = 0;
        return lt->matmul(lt->h, d, &one, wp, w, xp, x, &zero, op, o, op, o, algos[which].algo, lt->ws, 32 << 20, stream);
    }
};

static double time_graph(const std::function<void()>& work, int reps = 20) {
    cudaGraph_t g; cudaGraphExec_t e;
    work(); CK(cudaStreamSynchronize(stream));
    CK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal)); work(); CK(cudaStreamEndCapture(stream, &g)); CK(cudaGraphInstantiate(&e, g, 0));
    cudaEvent_t a, b; cudaEventCreate(&a); cudaEventCreate(&b);
    std::vector<float> t;
    for (int i = 0; i < reps + 2; ++i) {
        CK(cudaEventRecord(a, stream)); CK(cudaGraphLaunch(e, stream)); CK(cudaEventRecord(b, stream)); CK(cudaEventSynchronize(b));
        float ms; cudaEventElapsedTime(&ms, a, b); if (i >= 2) t.push_back(ms);
    }
    CK(cudaGetLastError());
    std::sort(t.begin(), t.end());
    cudaGraphExecDestroy(e); cudaGraphDestroy(g); cudaEventDestroy(a); cudaEventDestroy(b);
    return t[t.size() / 2] * 1e3;
}

// ---------- data ----------
static __device__ uint64_t mix(uint64_t i, uint32_t seed) {
    uint64_t z = (i + 1) * 0x9E3779B97F4A7C15ull + seed * 0xD1B54A32D192ED03ull; z ^= z >> 30; z *= 0xBF58476D1CE4E5B9ull; z ^= z >> 27; z *= 0x94D049BB133111EBull; return z ^ z >> 31;
}
template <typename T> __global__ void fill(T* p, size_t n, uint32_t seed, float scale) {
    for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < n; i += size_t(gridDim.x) * blockDim.x) {
        const float v = (float(mix(i, seed) >> 40) * 0x1p-23f - 1.0f) * scale;
        if constexpr (sizeof(T) == 4) p[i] = v; else p[i] = from_f32<T>(v);
    }
}
__global__ void four_fill(uint8_t* p, size_t units, uint32_t seed) {
    for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < units * 160; i += size_t(gridDim.x) * blockDim.x) {
        uint32_t v = uint32_t(mix(i, seed) >> 32);
        if (i % 160 >= 128) { const float s = (0.5f + float(v & 0xffff) / 131072.0f) * 0.01f; __half2 h = __floats2half2_rn(s, -7.5f * s + float(v >> 16) * 1e-8f); v = reinterpret_cast<uint32_t&>(h); }
        reinterpret_cast<uint32_t*>(p)[i] = v;
    }
}
// By the format's words: a thread an element.
__global__ void four_read(const uint8_t* p, float* out, int outputs, int inputs, int interleaved) {
    const int k = blockIdx.x * blockDim.x + threadIdx.x, o = blockIdx.y; if (k >= inputs) return;
    int tile, in_tile;
    if (interleaved) { const int half = o >= outputs / 2, at = o - half * (outputs / 2); tile = at / 8; in_tile = at % 8 + 8 * half; } else { tile = o / 16; in_tile = o % 16; }
    const int unit = k / 64, kk = k % 64, side = kk / 32, t = kk % 8 / 2, j = kk % 32 / 8 * 2 + kk % 2, g = in_tile % 8, half = in_tile / 8;
    const uint8_t* u = p + (size_t(tile) * (inputs / 64) + unit) * 640;
    const uint32_t word = reinterpret_cast<const uint32_t*>(u)[(g * 4 + t) * 4 + half * 2 + side];
    const int q = word >> (j / 2 * 4 + j % 2 * 16) & 15;
    const __half* sm = reinterpret_cast<const __half*>(u + 512 + g * 16 + (half * 2 + side) * 4);
    out[size_t(o) * inputs + k] = __half2float(sm[0]) * q + __half2float(sm[1]);
}
template <typename T> __global__ void reference(const T* x, const float* xr, const float* norm, float eps, const float* w, double* out, double* mag, int inputs, int outputs) {
    const int o = blockIdx.x * 8 + threadIdx.x / 32, r = blockIdx.y, lane = threadIdx.x % 32; if (o >= outputs) return;
    double scale = 1;
    if (xr) { double q = 0; for (int k = lane; k < inputs; k += 32) q += double(xr[size_t(r) * inputs + k]) * xr[size_t(r) * inputs + k]; for (int m = 16; m; m /= 2) q += __shfl_xor_sync(~0u, q, m); scale = 1 / sqrt(q / inputs + eps); }
    double s = 0, a = 0;
    for (int k = lane; k < inputs; k += 32) { double v = xr ? double(to_f32(from_f32<T>(float(xr[size_t(r) * inputs + k] * scale * norm[k])))) : double(to_f32(x[size_t(r) * inputs + k])); v *= double(w[size_t(o) * inputs + k]); s += v; a += fabs(v); }
    for (int m = 16; m; m /= 2) { s += __shfl_xor_sync(~0u, s, m); a += __shfl_xor_sync(~0u, a, m); }
    if (lane == 0) { out[size_t(r) * outputs + o] = s; mag[size_t(r) * outputs + o] = a; }
}
template <typename T> static double value(T v) { if constexpr (sizeof(T) == 4) return v; else if constexpr (std::is_same<T, bf16>::value) { uint16_t b; memcpy(&b, &v, 2); uint32_t f = uint32_t(b) << 16; float r; memcpy(&r, &f, 4); return r; } else return double(__half2float(v)); }

static int bad = 0, cases = 0;
static double worst_few = 0, worst_wide = 0;
template <typename T, Ending E> static void check_shape(const std::vector<Variant>& variants, int inputs, int outputs, int rows) {
    const size_t nx = size_t(rows) * inputs, units = size_t(outputs) / 16 * (inputs / 64), width = E == Ending::kSilu ? outputs / 2 : outputs, no = size_t(rows) * outputs;
    T *x, *wide_w; uint8_t* w; float *xr, *norm, *wf; char* out; double *ref, *mag;
    CK(cudaMalloc(&x, nx * 2)); CK(cudaMalloc(&w, units * 640)); CK(cudaMalloc(&wf, size_t(outputs) * inputs * 4)); CK(cudaMalloc(&wide_w, size_t(outputs) * inputs * 2)); CK(cudaMalloc(&xr, nx * 4)); CK(cudaMalloc(&norm, inputs * 4)); CK(cudaMalloc(&out, no * 4 + 4096)); CK(cudaMalloc(&ref, no * 8)); CK(cudaMalloc(&mag, no * 8));
    fill<T><<<256, 256, 0, stream>>>(x, nx, 1, 1.0f); four_fill<<<256, 256, 0, stream>>>(w, units, 2); fill<float><<<256, 256, 0, stream>>>(xr, nx, 3, 2.0f); fill<float><<<256, 256, 0, stream>>>(norm, inputs, 4, 1.0f);
    four_read<<<dim3((inputs + 255) / 256, outputs), 256, 0, stream>>>(w, wf, outputs, inputs, E == Ending::kSilu);
    widen_all<T><<<64, 256, 0, stream>>>(WidenParams{w, wide_w, uint32_t(outputs), uint32_t(inputs), E == Ending::kSilu});
    const bool widened = rows == 1;
    std::vector<float> f(widened ? size_t(outputs) * inputs : 0), got(no + 1024), before(no + 1024); std::vector<T> wd(f.size());
    if (widened) CK(cudaMemcpyAsync(f.data(), wf, f.size() * 4, cudaMemcpyDeviceToHost, stream)); if (widened) CK(cudaMemcpyAsync(wd.data(), wide_w, wd.size() * 2, cudaMemcpyDeviceToHost, stream)); CK(cudaStreamSynchronize(stream));
    const double eps = std::is_same<T, bf16>::value ? 1.0 / 256 : 1.0 / 2048;
    int wrong = 0;
    for (size_t i = 0; i < f.size(); ++i) if (!(fabs(value(wd[i]) - f[i]) <= fabs(f[i]) * eps + 1e-6)) ++wrong;
    if (wrong) { printf("BAD widened %dx%d: %d\n", outputs, inputs, wrong); ++bad; }
    std::vector<double> r(no), m(no);
    for (int normed = 0; normed < 2; ++normed) {
        bool any = false;
        for (auto& v : variants) any |= v.normed == bool(normed) && v.fits(inputs, outputs, rows);
        if (!any) continue;
        reference<T><<<dim3((outputs + 7) / 8, rows), 256, 0, stream>>>(x, normed ? xr : nullptr, norm, 1e-5f, wf, ref, mag, inputs, outputs);
        CK(cudaMemcpyAsync(r.data(), ref, no * 8, cudaMemcpyDeviceToHost, stream)); CK(cudaMemcpyAsync(m.data(), mag, no * 8, cudaMemcpyDeviceToHost, stream));
        for (auto& v : variants) {
            if (v.normed != bool(normed) || !v.fits(inputs, outputs, rows)) continue;
            CK(cudaMemsetAsync(out, 0xff, no * 4 + 4096, stream));
            if (E == Ending::kAdd) fill<float><<<256, 256, 0, stream>>>((float*)out, no, 5, 1.0f);
            CK(cudaMemcpyAsync(before.data(), out, before.size() * 4, cudaMemcpyDeviceToHost, stream));
            v.run(Call{v.normed ? (void*)xr : (void*)x, norm, w, out, inputs, outputs, rows});
            CK(cudaMemcpyAsync(got.data(), out, got.size() * 4, cudaMemcpyDeviceToHost, stream)); 
            const auto e = cudaStreamSynchronize(stream);
            if (e != cudaSuccess) { printf("FAILED %s end %d %dx%dx%d: %s\n", v.name.c_str(), int(E), rows, inputs, outputs, cudaGetErrorString(e)); exit(1); }
            double worst = 0; wrong = 0; int first_row = -1; size_t first_out = 0;
            for (int row = 0; row < rows; ++row) for (size_t o = 0; o < width; ++o) {
                const size_t i = row * width + o; double want, allow, g;
                const double add = v.normed ? eps / 8 : v.is_wide ? eps / 2 : 2e-5;
                if (E == Ending::kSilu) {
                    const double a = r[size_t(row) * outputs + o], b = r[size_t(row) * outputs + width + o], ma = m[size_t(row) * outputs + o], mb = m[size_t(row) * outputs + width + o];
                    want = a / (1 + exp(-a)) * b; allow = fabs(want) * eps + add * (ma * (fabs(b) + 1) + mb * (fabs(a) + 1)) + 1e-5; g = value(((T*)got.data())[i]);
                } else { const double a = r[i]; want = a; const double s = m[i] * add + 1e-6;
                    if (E == Ending::kStore) { g = value(((T*)got.data())[i]); allow = s + fabs(want) * eps; }
                    else if (E == Ending::kSingle) { g = got[i]; allow = s; if (m[i] > 0 && !v.normed) { double& w = v.is_wide ? worst_wide : worst_few; w = std::max(w, fabs(g - want) / m[i]); } }
                    else { want += before[i]; g = got[i]; allow = s + 1e-6 * fabs(want); } }
                const double err = fabs(g - want) / allow; if (!(err <= 1)) { if (!wrong) { first_row = row; first_out = o; } ++wrong; } if (!(err <= worst)) worst = err;
            }
            const size_t end = rows * width * (E == Ending::kStore || E == Ending::kSilu ? 2 : 4);
            for (size_t i = end; i < no * 4 + 4096; ++i) if (reinterpret_cast<uint8_t*>(got.data())[i] != 0xff && E != Ending::kAdd) { ++wrong; break; }
            ++cases; if (wrong) { ++bad; if (bad < 40) printf("BAD %s end %d %dx%dx%d: %d of %zu wrong, worst %.3g of allowance, first (%d, %zu)\n", v.name.c_str(), int(E), rows, inputs, outputs, wrong, rows * width, worst, first_row, first_out); }
        }
    }
    for (void* p : {(void*)x, (void*)w, (void*)wf, (void*)wide_w, (void*)xr, (void*)norm, (void*)out, (void*)ref, (void*)mag}) cudaFree(p);
}
template <typename T, Ending E> static void check(bool few) {
    int shapes[][2] = {{576, 960}, {4096, 496}, {11008, 256}, {11008, 4256}, {64, 48}, {1536, 2128}};
    for (auto& s : shapes) for (int rows : {1, 2, 3, 8, 9, 16, 17, 33, 64, 65, 129, 300}) {
        if ( (rows > 65 && (s[0] == 11008 || s[1] == 2128) && rows != 129) || (s[1] == 4256 && rows != 1 && rows != 8 && rows != 16 && rows != 64)) continue;
        std::vector<Variant> v = few ? rows <= 16 ? fews<T, E>() : std::vector<Variant>() : wides<T, E>(rows);
        check_shape<T, E>(v, s[0], s[1], rows);
    }
}

// ---------- times ----------
struct Matrix { const char* name; int in, out; Ending ending; bool normed; int count; };
static const Matrix kSeven[] = {{"qkv", 4096, 12288, Ending::kStore, true, 32}, {"o", 4096, 4096, Ending::kAdd, false, 32}, {"gate_up", 4096, 22016, Ending::kSilu, true, 32}, {"down", 11008, 4096, Ending::kAdd, false, 32}, {"head", 4096, 32000, Ending::kSingle, false, 1}};
static uint8_t *fours; static char* dense_weights; static size_t dense_bytes;
static std::vector<Variant> of(const Matrix& m, int rows, bool four) {
    std::vector<Variant> v;
    const auto pick = [&](auto e) {
        constexpr Ending E = decltype(e)::value;
        if (four) {
            if (rows <= 16) for (auto& x : fews<bf16, E>()) v.push_back(x);
            if (rows > 2) for (auto& x : wides<bf16, E>(rows)) v.push_back(x);
        } else if (rows <= 16) {
            v = {dense_variant<1, 1, 8, Input::kKept, E>("kept"), dense_variant<1, 2, 4, Input::kKept, E>("kept16"), dense_variant<1, 1, 8, Input::kNormed, E>("normed"), dense_variant<2, 1, 5, Input::kStreamed, E>("streamed"), dense_variant<2, 2, 4, Input::kStreamed, E>("streamed16")};
        }
    };
    switch (m.ending) {
        case Ending::kStore: pick(std::integral_constant<Ending, Ending::kStore>()); break;
        case Ending::kAdd: pick(std::integral_constant<Ending, Ending::kAdd>()); break;
        case Ending::kSilu: pick(std::integral_constant<Ending, Ending::kSilu>()); break;
        case Ending::kSingle: pick(std::integral_constant<Ending, Ending::kSingle>()); break;
    }
    v.erase(std::remove_if(v.begin(), v.end(), [&](const Variant& x) { return !x.fits(m.in, m.out, rows) || (x.normed && !m.normed); }), v.end());
    return v;
}
static void* io_x; static void* io_out; static float* io_norm;
static size_t four_bytes(const Matrix& m) { return size_t(m.in) / 64 * (m.out / 16) * 640; }
static double time_product(const Matrix& m, int rows, const Variant& v, bool four) {
    const size_t one = four ? four_bytes(m) : size_t(m.in) * m.out * 2;
    const int count = std::max<size_t>(4, (size_t(300) << 20) / one);
    return time_graph([&] { for (int i = 0; i < count; ++i) v.run(Call{io_x, io_norm, (four ? fours : (uint8_t*)dense_weights) + one * i, io_out, m.in, m.out, rows}); }) / count;
}
static void products(const std::vector<int>& row_counts) {
    char* scratch; CK(cudaMalloc(&scratch, size_t(300) << 20));
    double widening[5]; int w = 0;
    printf("widening:");
    for (auto& m : kSeven) { const int count = std::max<size_t>(4, (size_t(300) << 20) / four_bytes(m)); widening[w] = time_graph([&] { for (int i = 0; i < count; ++i) launch(widen_all<bf16>, dim3(132 * 16), 256, 0, WidenParams{fours + four_bytes(m) * i, scratch, uint32_t(m.out), uint32_t(m.in), 0}, false); }) / count; printf(" %s %.1f us (%.2f TB/s)", m.name, widening[w], (four_bytes(m) + size_t(m.in) * m.out * 2.0) / widening[w] / 1e6); ++w; }
    printf("\n");
    for (int rows : row_counts) {
        double four = 0, bf = 0, wl = 0; size_t bytes = 0; w = 0;
        for (auto& m : kSeven) {
            double best_dense = 1e30; const char* dense_name = "Lt"; static char why[64];
            for (auto& v : of(m, rows, false)) { const double t = time_product(m, rows, v, false); if (t < best_dense) { best_dense = t; snprintf(why, 64, "%s", v.name.c_str()); dense_name = why; } }
            if (lt->ok) { LtPlan p(m.in, m.out, rows, 14, m.ending == Ending::kSingle ? 0 : 14); const size_t d1 = size_t(m.in) * m.out * 2; const int count = std::max<size_t>(4, (size_t(300) << 20) / d1);
                for (size_t a = 0; a < p.algos.size(); ++a) { if (p.run(a, dense_weights, io_x, io_out)) continue; const double t = time_graph([&] { for (int i = 0; i < count; ++i) p.run(a, dense_weights + d1 * i, io_x, io_out); }, 8) / count; if (t < best_dense) { best_dense = t; dense_name = "Lt"; } } }
            std::string line; double best = 1e30; std::string name;
            for (auto& v : of(m, rows, true)) {
                const double t = time_product(m, rows, v, true);
                char s[64]; snprintf(s, 64, " %s %.1f", v.name.c_str(), t); line += s;
                if (t < best) { best = t; name = v.name; }
            }
            printf("%4d rows %-8s bf16 %.1f (%s) | best %.1f (%s, %.2f TB/s, %.0f TFLOP/s) x%.2f |%s\n", rows, m.name, best_dense, dense_name, best, name.c_str(), four_bytes(m) / best / 1e6, 2.0 * m.in * m.out * rows / best / 1e6, best_dense / best, line.c_str());
            four += best * m.count; bf += best_dense * m.count; wl += (best_dense + widening[w++]) * m.count; bytes += four_bytes(m) * m.count;
        }
        printf("%4d rows SUM four-bit %.3f ms (%.2f TB/s)  bf16 %.3f ms  x%.2f  widened %.3f ms x%.2f\n", rows, four / 1e3, bytes / four / 1e6, bf / 1e3, bf / four, wl / 1e3, bf / wl); fflush(stdout);
    }
    cudaFree(scratch);
}
// All products of a step one after the other, with the norms where they are kernels of their own.
static void step(int rows, bool four, bool attention) {
    size_t bytes = 0; for (auto& m : kSeven) bytes += four_bytes(m) * m.count;
    char *res, *normed, *qkv, *act, *att, *logits;
    CK(cudaMalloc(&res, rows * 4096 * 4)); CK(cudaMalloc(&normed, rows * 4096 * 2)); CK(cudaMalloc(&att, rows * 4096 * 2)); CK(cudaMalloc(&qkv, rows * 12288 * 2)); CK(cudaMalloc(&act, rows * 11008 * 2)); CK(cudaMalloc(&logits, size_t(rows) * 32000 * 4));
    fill<float><<<64, 256, 0, stream>>>((float*)res, rows * 4096, 1, 1.0f); fill<bf16><<<64, 256, 0, stream>>>((bf16*)att, rows * 4096, 2, 1.0f);
    // The kind of each product that takes the least time.
    const auto find = [&](const Matrix& m, bool four, bool n) -> Variant {
        Variant best; double least = 1e30;
        for (auto& v : of(m, rows, four)) {
            if (v.normed != n) continue;
            const double t = time_product(m, rows, v, four);
            if (t < least) { least = t; best = v; }
        }
        return best;
    };
    const bool n = rows <= 2;
    Variant v[5]; for (int i = 0; i < 5; ++i) v[i] = find(kSeven[i], four, n && kSeven[i].normed);
    const auto norms = [&] { NormArgs p = {(float*)res, nullptr, io_norm, nullptr, normed, 4096, 1e-5f}; launch(norm_early, dim3(rows), 256, 0, p, true); };
    const auto attend = [&] {
        cudaLaunchConfig_t c = {}; c.stream = stream; cudaLaunchAttribute at[1] = {}; c.attrs = at;
        at[0].id = cudaLaunchAttributeProgrammaticStreamSerialization; at[0].val.programmaticStreamSerializationAllowed = 1;
        c.gridDim = rows; c.blockDim = 512; c.numAttrs = 1; CK(cudaLaunchKernelEx(&c, busy, 700, 132u, 1));
        c.gridDim = 2 * sms; c.blockDim = 128; c.dynamicSmemBytes = 67216; c.numAttrs = 0; CK(cudaLaunchKernelEx(&c, busy, 3000, 96u, 0));
        c.gridDim = 32; c.dynamicSmemBytes = 0; c.numAttrs = 1; CK(cudaLaunchKernelEx(&c, busy, 700, 132u, 1));
    };
    const double us = time_graph([&] {
        const uint8_t* w = four ? fours : (uint8_t*)dense_weights;
        const auto go = [&](int i, const void* x, void* out) { v[i].run(Call{x, io_norm, w, out, kSeven[i].in, kSeven[i].out, rows}); w += four ? four_bytes(kSeven[i]) : size_t(kSeven[i].in) * kSeven[i].out * 2; };
        for (int l = 0; l < 32; ++l) { if (!n) norms(); go(0, n ? res : normed, qkv); if (attention) attend(); go(1, att, res); if (!n) norms(); go(2, n ? res : normed, act); go(3, act, res); }
        norms(); go(4, normed, logits);
    });
    printf("step %2d rows %s%s: %.3f ms (%.2f TB/s) with", rows, four ? "four-bit" : "bf16", attention ? " and attention" : "", us / 1e3, (four ? bytes : 13.21e9) / us / 1e6); for (auto& x : v) printf(" %s", x.name.c_str()); printf("\n"); fflush(stdout);
    for (void* p : {res, normed, att, qkv, act, logits}) cudaFree(p);
}

int main(int argc, char** argv) {
    setvbuf(stdout, nullptr, _IOLBF, 0);
    CK(cudaSetDevice(0)); CK(cudaStreamCreate(&stream)); CK(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0));
    cudaDriverEntryPointQueryResult q; CK(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", (void**)&encode, 12000, cudaEnableDefault, &q));
    const std::string what = argc > 1 ? argv[1] : "", part = argc > 2 ? argv[2] : "";
    std::vector<int> counts;
    for (int i = 2; i < argc; ++i) counts.push_back(atoi(argv[i]));
    if (what == "check") {
        if (part == "f16") {
            for (bool few : {true, false}) { check<f16, Ending::kSingle>(few); check<f16, Ending::kSilu>(few); }
        } else {
            const bool few = part == "few";
            check<bf16, Ending::kSingle>(few); check<bf16, Ending::kStore>(few); check<bf16, Ending::kAdd>(few); check<bf16, Ending::kSilu>(few);
        }
        printf("check %s: %d of %d cases bad; worst error %.3g of the sum of magnitudes, wide %.3g\n", part.c_str(), bad, cases, worst_few, worst_wide);
        return bad != 0;
    }
    const size_t units = (size_t(5) << 30) / 640; CK(cudaMalloc(&fours, units * 640)); four_fill<<<2048, 256, 0, stream>>>(fours, units, 7);
    CK(cudaMalloc(&io_x, size_t(1024) * 11008 * 4)); CK(cudaMalloc(&io_out, size_t(1024) * 32000 * 4)); CK(cudaMalloc(&io_norm, 32768 * 4));
    fill<bf16><<<1024, 256, 0, stream>>>((bf16*)io_x, size_t(1024) * 11008 * 2, 1, 1.0f); fill<float><<<64, 256, 0, stream>>>(io_norm, 32768, 4, 1.0f); CK(cudaMemsetAsync(io_out, 0, size_t(1024) * 32000 * 4, stream)); CK(cudaStreamSynchronize(stream));
    if (what == "few") { for (auto& v : of(kSeven[2], 1, true)) if (v.name == "f4n") for (int i = 0; i < 4; ++i) v.run(Call{io_x, io_norm, fours + i * four_bytes(kSeven[2]), io_out, 4096, 22016, 1}); CK(cudaStreamSynchronize(stream)); return 0; }
    if (what == "wide") { for (int rows : {64, 256}) for (auto& v : of(kSeven[2], rows, true)) if (v.name == "w64/1" || (rows == 256 && v.name == "w128/1")) for (int i = 0; i < 2; ++i) v.run(Call{io_x, io_norm, fours + i * four_bytes(kSeven[2]), io_out, 4096, 22016, rows}); CK(cudaStreamSynchronize(stream)); return 0; }
    CK(cudaFuncSetAttribute(busy, cudaFuncAttributeMaxDynamicSharedMemorySize, 67216));
    Lt the; lt = &the;
    dense_bytes = size_t(14) << 30; CK(cudaMalloc(&dense_weights, dense_bytes)); fill<bf16><<<2048, 256, 0, stream>>>((bf16*)dense_weights, dense_bytes / 2, 9, 0.05f); CK(cudaStreamSynchronize(stream));
    if (what == "step") for (int rows : counts) {
        for (bool four : {false, true}) for (bool attention : {false, true}) step(rows, four, attention);
    }
    if (what == "products") products(counts);
    return 0;
}
