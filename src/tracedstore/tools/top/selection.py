"""What is selected on the screen, and how keys move it."""

from collections.abc import Mapping, Sequence

from tracedstore.tools.job_view import JobView, RankName, RankState, RankView
from tracedstore.tools.top import fleet, views
from tracedstore.tools.top.rows import Target, TextRow, row, styled

# What ranks answered when they were asked for their stacks.
Stacks = Mapping[RankName, Sequence[str]]


class Selection:
    """The rows of the current view, and the one that is selected.

    Attributes:
        view: The name of the view.
        pattern: The filter of the fleet.
        rows: The rows of the view.
    """

    def __init__(self) -> None:
        self.view = views.VIEWS[0]
        self.pattern = ""
        self.rows: list[TextRow] = []
        self._ranks: list[list[RankView]] = []
        self._targets: dict[str, Target] = {}
        self._unfolded: set[RankState] = set()
        # Until the user selects a rank, the worst one is.
        self._chosen = False

    @property
    def target(self) -> Target | None:
        """What is selected in the current view."""
        return self._targets.get(self.view)

    def select(self, target: Target) -> None:
        """Select something in the current view."""
        self._targets[self.view] = target
        self._chosen = self._chosen or self.view == "fleet"

    def arrange(self, job: JobView, width: int, height: int) -> None:
        """Make the rows of a job, and keep the selection, or select the worst."""
        if self.view == "fleet":
            self._arrange_fleet(job, width, height)
            return
        self._ranks = []
        self.rows = views.view_rows(self.view, job, width)
        targets = [one.target for one in self.rows if one.target]
        if self.target not in targets:
            self._targets.pop(self.view, None)
            if targets:
                self.select(targets[0])

    def _arrange_fleet(self, job: JobView, width: int, height: int) -> None:
        grid = fleet.layout(
            job.ranks,
            width,
            height,
            unfolded=self._unfolded,
            pattern=self.pattern,
        )
        self.rows, self._ranks = grid.rows, grid.ranks
        if not self.rows:
            text = " no rank matches" if self.pattern else " no rank has registered"
            self.rows = [] if job.loading else [row(styled(text, "dim"))]
        if self._line() is None or not self._chosen:
            self._targets.pop("fleet", None)
            shown = [rank for line in self._ranks for rank in line]
            worst = min(shown, key=lambda rank: (rank.state, rank.name), default=None)
            if worst is not None:
                self._targets["fleet"] = "rank", worst.name
            elif self.rows and (first := self.rows[0].target) is not None:
                self._targets["fleet"] = first

    def _line(self) -> int | None:
        """Return the row with the selection."""
        target = self.target
        for number, one in enumerate(self.rows):
            if one.target is not None and one.target == target:
                return number
        for number, ranks in enumerate(self._ranks):
            if any(("rank", rank.name) == target for rank in ranks):
                return number
        return None

    def move(self, lines: int, columns: int) -> int | None:
        """Move the selection; return the row that it is in then."""
        if not self.rows:  # nothing has been read yet
            return None
        if self.view == "fleet":
            return self._move_in_fleet(lines, columns)
        places = [n for n, one in enumerate(self.rows) if one.target]
        if not places:
            return None
        line = self._line()
        index = places.index(line) if line is not None else 0
        index = min(len(places) - 1, max(0, index + lines))
        target = self.rows[places[index]].target
        if target is not None:
            self.select(target)
        # The heading above the first one is shown with it.
        return 0 if index == 0 else places[index]

    def _move_in_fleet(self, lines: int, columns: int) -> int:
        line = self._line() or 0
        ranks = self._ranks[line] if self._ranks else []
        places: dict[Target, int] = {
            ("rank", rank.name): n for n, rank in enumerate(ranks)
        }
        place = 0 if self.target is None else places.get(self.target, 0)
        line = min(len(self.rows) - 1, max(0, line + lines))
        if not self._selectable(line):
            line = min(len(self.rows) - 1, line + 1)
        ranks = self._ranks[line] if self._ranks else []
        if ranks:
            place = min(len(ranks) - 1, max(0, place + columns))
            self.select(("rank", ranks[place].name))
        elif (target := self.rows[line].target) is not None:
            self.select(target)
        return line

    def _selectable(self, line: int) -> bool:
        """Return whether a row of the fleet is more than a heading."""
        ranks = self._ranks[line] if self._ranks else []
        return bool(ranks) or self.rows[line].target is not None

    def unfold(self) -> bool:
        """Show the hosts of the selected fold; return whether a fold is selected."""
        target = self.target
        if (
            self.view != "fleet"
            or target is None
            or not isinstance(target[1], RankState)
        ):
            return False
        self._unfolded.add(target[1])
        del self._targets["fleet"]
        return True

    def fold(self) -> None:
        """Fold all hosts again."""
        self._unfolded.clear()

    def rank(self, job: JobView) -> RankView | None:
        """Return the selected rank; None if none is."""
        target = self.target
        if target is None or target[0] != "rank":
            return None
        return next((one for one in job.ranks if one.name == target[1]), None)

    def detail_rows(self, job: JobView, width: int, stacks: Stacks) -> list[TextRow]:
        """Return everything about what is selected."""
        target = self.target
        if target is not None and target[0] == "barrier":
            return views.barrier_detail(job, str(target[1]), width)
        if target is not None and target[0] == "group":
            return views.group_detail(job, str(target[1]), width)
        rank = self.rank(job)
        if rank is None:
            known = job.details or job.notes
            return views.detail_of_headline(job, width) if known else []
        return views.rank_rows(job, rank, width, stacks.get(rank.name, ()))
