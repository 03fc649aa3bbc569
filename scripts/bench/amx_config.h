// For compiling llama.cpp with GCC 12 and older on processors with AMX: their _tile_loadconfig says that it reads 8 of its operand's
// 64 bytes, so that stores to the others move behind it, and the first tile instruction is then an invalid opcode.
#if defined(__AMX_TILE__) && defined(__GNUC__) && !defined(__clang__)
#include <immintrin.h>
#undef _tile_loadconfig
#define _tile_loadconfig(config) __asm__ volatile("ldtilecfg\t%X0" ::"m"(*(const char(*)[64])(config)) : "memory")
#undef _tile_storeconfig
#define _tile_storeconfig(config) __asm__ volatile("sttilecfg\t%X0" : "=m"(*(char(*)[64])(config))::"memory")
#endif
