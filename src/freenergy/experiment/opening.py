"""From the settings of a subject to the subject."""

from pathlib import Path

from freenergy.experiment.plan import SubjectSettings
from freenergy.experiment.settings import LanguageSubject
from freenergy.experiment.subject import Subject
from freenergy.progress import Progress
from freenergy.translation.settings import TranslationSubject


def open_subject(settings: SubjectSettings, folder: Path, progress: Progress) -> Subject:
    """The subject, with its prepared data in ``folder``."""
    if isinstance(settings, LanguageSubject):
        from freenergy.experiment.language import open_language

        return open_language(settings, folder, progress)
    if isinstance(settings, TranslationSubject):
        from freenergy.translation.subject import open_translation

        return open_translation(settings, folder, progress)
    from freenergy.images.subject import open_images

    return open_images(settings, folder, progress)
