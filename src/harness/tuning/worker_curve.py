from collections.abc import Sequence

from matplotlib.figure import Figure

from harness.data.measuring import Measured


def table(found: Sequence[Measured], chosen: int, batch_size: int) -> str:
    """A line per number of workers; the knee is marked."""
    lines = ["workers   batches/s   samples/s   ms of each step"]
    for m in found:
        speed = 1 / m.seconds_per_batch
        mark = "   <- more is not better" if m.num_workers == chosen else ""
        lines.append(
            f"{m.num_workers:7}   {speed:9.1f}   {speed * batch_size:9.0f}   "
            f"{m.seconds_of_step * 1000:15.2f}{mark}"
        )
    return "\n".join(lines)


def picture(found: Sequence[Measured], chosen: int) -> Figure:
    """The same as a curve."""
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.add_subplot(
        xlabel="data.num_workers", ylabel="batches per second", title="Reading alone"
    )
    numbers = [m.num_workers for m in found]
    speeds = [1 / m.seconds_per_batch for m in found]
    axes.plot(numbers, speeds, marker="o")
    axes.plot(chosen, speeds[numbers.index(chosen)], marker="o", markersize=12, color="C1")
    axes.annotate(
        f"{chosen}: more is not better",
        (chosen, speeds[numbers.index(chosen)]),
        xytext=(8, -14),
        textcoords="offset points",
    )
    axes.set_xticks(numbers)
    axes.set_ylim(bottom=0)
    return figure
