// Chapters: their menu, the strip with the question and the beats, guesses by clicking marks. viz/stage/tour.py decides
// everything; this shows what it told and says what was pressed.
class Chapters extends Menu {
  // `before`: what this page knew before its words were exchanged.
  constructor(stage, before = null) {
    super();
    this.stage = stage;
    Object.assign(this, { list: before ? before.list : [], told: before ? before.told : null, serial: before ? before.serial : -1, arrived: Boolean(before), seen: 0 });
    this.button = h("button", { type: "button", class: "glass-button glass-text glass-chapters", "aria-haspopup": "menu", "aria-expanded": "false", "aria-label": WORDS.chapter.menu, hidden: true, onclick: () => this.toggle() },
      icon("chapters"), h("span", { text: WORDS.chapter.menu }));
    this.menu = h("div", { class: "glass-menu glass-contents", role: "menu", "aria-label": WORDS.chapter.menu, hidden: true, onkeydown: (e) => this.key(e), onfocusout: (e) => { if (!this.menu.contains(e.relatedTarget) && e.relatedTarget !== this.button) this.close(false); } });
    this.back = iconButton("previous", WORDS.chapter.previous, () => this.by(-1));
    this.next = iconButton("next", WORDS.chapter.next, () => this.by(1));
    this.dots = h("span", { class: "glass-dots", "aria-hidden": "true" });
    this.count = h("span", { class: "glass-beat" });
    this.mark = h("span", { class: "glass-verdict", hidden: true });
    this.text = h("span", { class: "glass-asks" });
    this.cue = h("span", { class: "glass-cue" });
    this.reveal = h("button", { type: "button", class: "glass-button glass-primary", text: WORDS.chapter.reveal, hidden: true, onclick: () => this.by(1) });
    this.tryThis = h("button", { type: "button", class: "glass-button glass-text", text: WORDS.chapter.try, hidden: true, onclick: () => this.turn() });
    this.live = h("span", { class: "glass-hidden", "aria-live": "polite" });
    this.strip = h("section", { class: "glass-strip", hidden: true },
      h("span", { class: "glass-turn" }, this.back, this.dots, this.count, this.next),
      h("p", { class: "glass-line" }, this.mark, this.text), this.cue, this.reveal, this.tryThis,
      iconButton("close", WORDS.chapter.leave, () => stage.command("chapter_end"), { class: "glass-button glass-leave" }), this.live);
    this.showList();
  }

  get isGuest() { return this.stage.people.isGuest; }
  get offer() { return this.told && this.told.try && this.told.phase !== "asked" && !this.isGuest ? this.told.try : null; }
  get asking() { return Boolean(this.told && this.told.phase === "asked"); }

  by(direction) { if (this.told || this.list.length) this.stage.command("beat", { by: direction }); }

  // ---- what the server told ----

  take(header) {
    if (header.chapters !== undefined) { this.list = header.chapters || []; this.showList(); }
    if (header.tour === undefined) return;
    this.told = header.tour;
    if (!this.arrived) this.arrive();
    if (this.told) this.follow();
    else if (this.serial >= 0) { this.serial = -1; if (!this.isGuest) this.stage.setState({ chapter: "", beat: 0 }); }
    this.show();
  }

  // An address that names a chapter leads there, once.
  arrive() {
    this.arrived = true;
    const { chapter, beat, source } = this.stage.state;
    if (!this.told && chapter && (!source || source === "live") && !this.isGuest && this.list.some((c) => c.name === chapter)) this.stage.command("chapter", { name: chapter, beat: Number(beat) || 0, link: true });
  }

  // Where the beat is to be looked at: once for each place. Guests are shown what their host sees.
  follow() {
    const { go, chapter, beat } = this.told, { state } = this.stage;
    if (this.isGuest) return void (this.serial = go.serial);
    if (go.serial === this.serial) {
      if (state.chapter !== chapter || state.beat !== beat) this.stage.setState({ chapter, beat });
      return;
    }
    this.serial = go.serial;
    const known = new Set(this.stage.catalogue.map((v) => v.name)), views = go.views.filter((v) => known.has(v));
    const exchanged = views.length && views.join() !== state.views.join();
    if (exchanged) { state.views = views; this.stage.max = null; this.stage.tab = 1; }
    Object.assign(state, { chapter, beat, step: go.step, selection: go.select });
    if (exchanged) this.stage.arrange();
    this.stage.setState({});
  }

  // ---- the strip ----

  show() {
    const { told, strip } = this, { root } = this.stage;
    root.classList.toggle("glass-touring", Boolean(told));
    root.classList.toggle("glass-asking", this.asking);
    strip.hidden = !told;
    if (this.list.length) for (const item of this.menu.children) item.setAttribute("aria-current", String(Boolean(told && item.dataset.name === told.chapter)));
    if (!told) return this.redraw();
    strip.dataset.phase = told.phase;
    strip.setAttribute("aria-label", told.title);
    this.back.disabled = told.first;
    this.next.disabled = told.last && told.phase !== "asked" && told.phase !== "going";
    setText(this.count, WORDS.chapter.beatOf(told.beat + 1, told.beats));
    if (this.dots.childElementCount !== told.beats) this.dots.replaceChildren(...Array.from({ length: told.beats }, () => h("i")));
    [...this.dots.children].forEach((dot, i) => { dot.dataset.at = i < told.beat ? "past" : i === told.beat ? "now" : "next"; });
    this.showLine(told, told.predict);
    this.reveal.hidden = !this.asking || this.isGuest;
    this.tryThis.hidden = !this.offer;
    this.redraw();
  }

  showLine(told, predict) {
    const decided = told.phase === "revealed" && predict && predict.verdict;
    const verdict = decided ? { right: ["check", WORDS.chapter.right], wrong: ["close", WORDS.chapter.wrong], none: ["answer", WORDS.chapter.answer] }[predict.verdict] : this.asking ? ["help", WORDS.chapter.question] : null;
    this.mark.hidden = !verdict;
    this.mark.dataset.verdict = decided ? predict.verdict : "ask";
    if (verdict && this.mark.dataset.said !== verdict[1]) { this.mark.dataset.said = verdict[1]; this.mark.replaceChildren(icon(verdict[0]), h("span", { text: verdict[1] })); }
    const line = decided ? predict.reveal : this.asking ? predict.question : told.note || (this.offer ? this.offer.text : told.question);
    setText(this.text, line);
    this.text.title = line;
    setText(this.cue, this.cueOf(told, predict));
    const news = decided ? `${verdict[1]}. ${line}` : this.asking ? `${predict.question} ${WORDS.chapter.cue}` : told.note || "";
    if (news) setText(this.live, news);
  }

  cueOf(told, predict) {
    if (told.phase === "going") return WORDS.chapter.going;
    if (!predict) return "";
    const votes = predict.votes > 1 ? WORDS.chapter.votes(predict.votes) : "";
    if (this.asking) return [predict.guess ? WORDS.chapter.guessed(this.nameOf(predict.guess)) : WORDS.chapter.cue, votes].filter(Boolean).join(" · ");
    if (predict.votes < 2 || !predict.tally) return this.offer ? this.offer.text : "";
    return [WORDS.chapter.agreed(predict.agreed, predict.votes), ...predict.tally.slice(0, 3).map((t) => WORDS.chapter.tally(t.votes, this.nameOf(t.mark)) + (t.right ? " ✓" : ""))].join(" · ");
  }

  // What a mark is called in the picture, up to its first stop.
  nameOf(id) {
    for (const panel of this.stage.shown()) {
      const mark = panel.marks().find((m) => m[0] === id);
      if (mark) return short(mark[5].split(/[:,.。、：]/)[0], 24);
    }
    return id;
  }

  // The beat's own sentence, as long as its step is on screen.
  sentence() {
    const { told, stage } = this;
    return told && told.sentence && told.phase !== "going" && told.phase !== "revealed" && stage.at.step === told.at ? told.sentence : null;
  }

  // The server begins the beat's example again with this knob. Whoever loses a cache by it is named before.
  async turn() {
    const { knob, value } = this.offer, { people, status } = this.stage, known = (status.knobs || {})[knob];
    if (!(await people.agrees(knob, value, known ? known.cost : "nothing", WORDS.people.ends))) return;
    const reply = await this.stage.command("chapter_try");
    if (reply.ok) this.stage.tellNotice(WORDS.chapter.tried, false);
  }

  // ---- guesses ----

  guessable(mark) { return this.asking && this.told.predict.marks.includes(mark[0].split(":")[0]); }

  guess(mark) {
    this.told.predict.guess = mark[0]; // seen at once; the server has the last word
    this.show();
    return this.stage.command("guess", { mark: mark[0] });
  }

  // {kinds: mark id → how it is to be outlined, guess: mark id}; null for nothing.
  outlined() {
    const { told } = this, predict = told && told.phase !== "going" && told.predict;
    if (!predict || !(predict.guess || predict.right)) return null;
    const kinds = new Map((predict.right || []).map((id) => [id, "right"]));
    if (predict.guess && !kinds.has(predict.guess)) kinds.set(predict.guess, predict.right ? "wrong" : "guess");
    return { kinds, guess: predict.guess };
  }

  redraw() { for (const panel of this.stage.panels || []) panel.draw(); }

  // ---- the menu ----

  showList() {
    this.button.hidden = !this.list.length;
    this.menu.replaceChildren(...this.list.map((chapter, i) => h("button", { type: "button", role: "menuitem", class: "glass-item", tabIndex: -1, "data-name": chapter.name, onclick: () => this.begin(chapter.name) },
      h("b", { text: String(i + 1) }), h("span", {}, h("strong", { text: chapter.title }), h("small", { text: chapter.question })))));
  }

  begin(name) {
    this.close();
    this.stage.command("chapter", { name });
  }

  open() {
    this.menu.hidden = false;
    this.button.setAttribute("aria-expanded", "true");
    const items = [...this.menu.children];
    (items.find((item) => item.getAttribute("aria-current") === "true") || items[0]).focus();
  }
}
