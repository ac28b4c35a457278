"""A picture of the labels of a test, for runs whose pictures tests look at."""

from matplotlib.figure import Figure

from harness import Picture


class Labels(Picture):
    """How often each label came."""

    name = "test/labels"

    def reset(self):
        """Reset."""
        self.labels = []

    def update(self, outputs, batch):
        """Take the labels of one batch."""
        self.labels += outputs["labels"].tolist()

    def kept(self):
        """Return the labels of this rank."""
        return self.labels

    def draw(self, parts):
        """Draw what all processes have seen."""
        figure = Figure()
        figure.subplots().hist([label for labels in parts for label in labels])
        return figure
