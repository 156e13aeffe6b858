"""Train demo_dit, the tiny diffusion transformer that ships with normscope, and write it.

The same seed makes the same bytes again on the same machine and versions: ``python scripts/train_demo_dit.py``.
"""

import diffusers
import torch
import torch.nn.functional as F
from diffusers import DDIMScheduler, DiTTransformer2DModel
from torch import Tensor, nn
from train_demo_vit import PIXELS_TO_INPUT, load_pixels_and_labels, options, parsed, save_model, split, trained

import normscope

CONFIG = {
    "num_attention_heads": 4,
    "attention_head_dim": 16,
    "in_channels": 1,
    "out_channels": 1,
    "num_layers": 8,
    "sample_size": 8,
    "patch_size": 2,
    "num_embeds_ada_norm": 10,
}
SCHEDULER = {
    "num_train_timesteps": 1000,
    "beta_schedule": "linear",
    "beta_start": 1e-4,
    "beta_end": 0.02,
    "prediction_type": "sample",
    "clip_sample": True,
    "clip_sample_range": 1.0,
    "set_alpha_to_one": True,
    "timestep_spacing": "leading",
}
PIXELS_TO_LATENT = {"scale": 0.125, "offset": -1.0}
RECIPE = {
    "steps": 2700,
    "batch_size": 64,
    "peak_lr": 1.5e-3,
    "warmup_steps": 100,
    "weight_decay": 0.0,
    "clip": 1.0,
    "ema_decay": 0.998,
    "unlabelled": 0.1,
}
CLASSES, NO_CLASS = 10, 10
SAMPLING_STEPS, SAMPLES_A_CLASS = 50, 20


def main() -> None:
    args = parsed(options(__doc__))
    images, labels = load_pixels_and_labels()
    train, validation, _ = split(len(images), args.seed)
    shown = torch.cat([train, validation])
    weights = train_dit(images[shown], labels[shown], args.seed).half().state_dict()
    model = DiTTransformer2DModel(**CONFIG).eval()
    model.load_state_dict(weights)
    asked = torch.arange(CLASSES).repeat_interleave(SAMPLES_A_CLASS)
    score = recognised(sample(model, asked, args.seed), asked)
    print(f"recognised {score:.3f} ({round(score * len(asked))}/{len(asked)})")
    args.out.mkdir(parents=True, exist_ok=True)
    facts = {"config": CONFIG, "scheduler": SCHEDULER, "pixels": PIXELS_TO_LATENT, "seed": args.seed}
    facts |= {"steps": RECIPE["steps"], "recognised": score}
    facts |= {"torch": torch.__version__, "diffusers": diffusers.__version__}
    save_model("demo_dit", args.out, weights, facts)


def to_latent(pixels: Tensor) -> Tensor:
    return pixels.float()[:, None] * PIXELS_TO_LATENT["scale"] + PIXELS_TO_LATENT["offset"]  # (n,8,8) -> (n,1,8,8)


def train_dit(pixels: Tensor, labels: Tensor, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    # In train mode diffusers would drop the label in every block by itself, and never in all at once.
    model = DiTTransformer2DModel(**CONFIG).eval()
    let_the_pixels_outweigh_the_positions(model)
    scheduler = DDIMScheduler(**SCHEDULER)

    def loss() -> Tensor:
        batch = torch.randint(len(pixels), (RECIPE["batch_size"],), generator=generator)
        clean = to_latent(pixels[batch])
        timesteps = torch.randint(SCHEDULER["num_train_timesteps"], (len(batch),), generator=generator)
        noisy = scheduler.add_noise(clean, torch.randn(clean.shape, generator=generator), timesteps)
        unlabelled = torch.rand(len(batch), generator=generator) < RECIPE["unlabelled"]
        shown_labels = labels[batch].masked_fill(unlabelled, NO_CLASS)
        return F.mse_loss(model(noisy, timestep=timesteps, class_labels=shown_labels).sample, clean)

    return trained(model, loss, RECIPE, 100)


@torch.no_grad()
def let_the_pixels_outweigh_the_positions(model: nn.Module) -> None:
    """Double the patch embedding, and cancel the mean of the sin-cos table, which would shift every token alike."""
    model.pos_embed.proj.weight.mul_(2)
    model.pos_embed.proj.bias.copy_(-model.pos_embed.pos_embed.mean(dim=(0, 1)))  # (1,16,64) -> (64,)


@torch.no_grad()
def sample(model: nn.Module, labels: Tensor, seed: int) -> Tensor:
    """Denoise one latent for each label, by DDIM without guidance: (n,) -> (n,1,8,8)."""
    scheduler = DDIMScheduler(**SCHEDULER)
    scheduler.set_timesteps(SAMPLING_STEPS)
    latents = torch.randn(len(labels), 1, 8, 8, generator=torch.Generator().manual_seed(seed))
    for timestep in scheduler.timesteps:
        clean = model(latents, timestep=timestep.expand(len(labels)), class_labels=labels).sample
        latents = scheduler.step(clean, timestep, latents).prev_sample
    return latents


@torch.no_grad()
def recognised(latents: Tensor, labels: Tensor) -> float:
    """Return the share of the latents in which demo_vit reads the digit that was asked for."""
    vit = normscope.load("demo_vit", device="cpu").module
    pixels = (latents - PIXELS_TO_LATENT["offset"]) / PIXELS_TO_LATENT["scale"]
    logits = vit(pixels * PIXELS_TO_INPUT["scale"] + PIXELS_TO_INPUT["offset"])
    return (logits.argmax(dim=1) == labels).double().mean().item()


if __name__ == "__main__":
    main()
