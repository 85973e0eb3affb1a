"""The images that environments have shown to the policy: made into pixels once, and again where these are gone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from spmdrl.conversation import Observation
from spmdrl.data.images import ImageFile
from spmdrl.data.vision import ImageIntake
from spmdrl.types import ImageSpan, Rollout, UserError


def spans_of(observation: Observation, images: ImageIntake) -> tuple[ImageSpan, ...]:
    """Keep the pixels of an observation's images; the first placeholder of each is token 0.

    Raises UserError when one cannot be read.
    """
    return tuple(images.span(ImageFile(file)) for file in observation.images)


def restore(shown: Sequence[ImageSpan], observations: Iterable[Observation], images: ImageIntake) -> None:
    """Put the images that a policy was `shown` by its environment into the node's store again, unless they are there.

    `observations` are those of its episode; what follows the images that were shown has not been read. Raises UserError
    when they are others now.
    """
    files = (file for observation in observations for file in observation.images)
    for image, file in zip(shown, files, strict=False):
        if not images.has([image]) and images.span(ImageFile(file)).digest != image.digest:
            raise UserError(
                f"an image of an environment, of {len(file)} bytes, is not what it was before: the model's processor, "
                "data.min_pixels or data.max_pixels have changed since; set them back"
            )


def restore_rollout(rollout: Rollout, images: ImageIntake) -> None:
    """Do that for the images of a finished episode, all of which its last trajectory has, after those of the prompt."""
    restore(rollout.trajectories[-1].images[len(rollout.prompt.images) :], rollout.observations, images)
