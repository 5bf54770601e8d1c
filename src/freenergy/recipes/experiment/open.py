"""From the settings of a subject to the subject."""

from pathlib import Path

from freenergy.apps.translation.settings import TranslationSubject
from freenergy.core.progress import Progress
from freenergy.recipes.experiment.plan import SubjectSettings
from freenergy.recipes.experiment.settings import LanguageSubject
from freenergy.recipes.experiment.subject import Subject


def open_subject(settings: SubjectSettings, folder: Path, progress: Progress) -> Subject:
    """The subject, with its prepared data in ``folder``."""
    if isinstance(settings, LanguageSubject):
        from freenergy.recipes.experiment.language import open_language

        return open_language(settings, folder, progress)
    if isinstance(settings, TranslationSubject):
        from freenergy.apps.translation.subject import open_translation

        return open_translation(settings, folder, progress)
    from freenergy.apps.images.subject import open_images

    return open_images(settings, folder, progress)
