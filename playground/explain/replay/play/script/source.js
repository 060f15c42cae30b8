/** The program, with the ranks at the lines at which they are. */
class Source {
  constructor(run) {
    this.run = run;
    this.heading = element("p", {class: "title"});
    this.lines = element("pre", {role: "group", tabindex: 0, "aria-label": "Source"});
    this.root = element("section", {}, this.heading, this.lines);
    this.file = null;
    this.marked = [];
  }

  /** Show the line of one rank, and whatever other ranks are in the same file. */
  show(clock, time, selected, chosen) {
    const places = this.run.ranks.map((_, rank) => this.run.sourceAt(clock, rank, time));
    if (chosen !== null) places[selected] = chosen;
    const key = `${selected} ${places.join(" ")}`;
    if (key === this.shown) return;
    this.shown = key;
    this.clear();
    const place = places[selected];
    write(this.heading, place === null ? `Rank ${selected}: no line is recorded` : this.title(selected, place));
    if (place === null) return;
    this.open(this.run.sources[place].file);
    const lines = new Map();
    places.forEach((each, rank) => {
      if (each === null || this.run.sources[each].file !== this.file) return;
      const {line} = this.run.sources[each];
      lines.set(line, [...(lines.get(line) ?? []), this.run.ranks[rank].rank]);
    });
    for (const [line, ranks] of lines) this.mark(line, ranks);
    this.markPage(places);
    this.scroll(this.run.sources[place].line);
  }

  title(rank, place) {
    const {file, line, name} = this.run.sources[place];
    return `Rank ${rank}: ${file}:${line} in ${name}`;
  }

  open(file) {
    if (file === this.file) return;
    this.file = file;
    const text = this.run.texts[file];
    const lines = text ? text.replace(/\n$/, "").split("\n") : [];
    this.lines.hidden = !text;
    this.lines.replaceChildren(...lines.map((line, index) =>
      element("div", {}, element("span", {class: "ranks"}), element("span", {class: "number"}, `${index + 1}`),
        element("span", {}, line))));
  }

  clear() {
    for (const line of this.marked) {
      line.classList.remove("here");
      write(line.firstChild, "");
    }
    this.marked = [];
  }

  mark(number, ranks) {
    const line = this.lines.children[number - 1], all = this.run.ranks.length;
    if (!line) return;
    line.classList.add("here");
    write(line.firstChild, ranks.length === all && all > 1 ? "all ranks" : `rank ${ranks.join(", ")}`);
    this.marked.push(line);
  }

  /** Mark the lines that are beside this player on its page, once a reader works with it. */
  markPage(places) {
    if (Player.current?.place !== this.root.closest(".player")) return;
    for (const line of document.querySelectorAll("[data-ranks]")) delete line.dataset.ranks;
    places.forEach((place, rank) => {
      const address = place === null ? "" : addressOf(this.run, place) ?? "";
      const line = address.startsWith("#") && document.getElementById(address.slice(1));
      if (!line) return;
      line.dataset.ranks = line.dataset.ranks ? `${line.dataset.ranks}, ${rank}` : `rank ${rank}`;
      const code = line.closest("pre");
      code.scrollTop = line.offsetTop - code.clientHeight / 2;
    });
  }

  scroll(number) {
    const line = this.lines.children[number - 1];
    if (line) this.lines.scrollTop = line.offsetTop - this.lines.clientHeight / 2;
  }
}
