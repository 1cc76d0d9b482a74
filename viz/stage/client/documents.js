// Texts beside a panel's picture (Frame.documents): a tab each, one at a time. Whatever stands in them is set as text.
class Documents {
  constructor(panel) {
    this.panel = panel;
    this.at = 0;
    this.tabs = h("div", { class: "glass-doctabs", role: "tablist", "aria-label": WORDS.documents.title, onkeydown: (e) => this.key(e) });
    this.id = `glass-document-${panel.index}-${Math.random().toString(36).slice(2)}`;
    this.page = h("div", { class: "glass-page", role: "tabpanel", id: this.id, tabIndex: 0 });
    this.root = h("div", { class: "glass-documents", hidden: true }, this.tabs, this.page);
  }

  // The tab of the same title stays in front when the texts change.
  show(documents) {
    const shown = documents || [];
    if (shown === this.shown) return;
    const title = this.shown && this.shown[this.at] ? this.shown[this.at].title : null;
    this.shown = shown;
    this.root.hidden = !shown.length;
    this.panel.area.classList.toggle("glass-both", shown.length > 0);
    this.tabs.replaceChildren(...shown.map((one, i) => h("button", { type: "button", role: "tab", class: "glass-doctab", "aria-controls": this.id, id: `${this.id}-${i}`, text: one.title, onclick: () => this.turn(i) })));
    this.turn(Math.max(shown.findIndex((one) => one.title === title), 0), true);
  }

  turn(at, again = false) {
    this.at = at;
    const one = this.shown[at];
    [...this.tabs.children].forEach((tab, i) => { tab.setAttribute("aria-selected", String(i === at)); tab.tabIndex = i === at ? 0 : -1; });
    if (!one) return this.page.replaceChildren();
    const same = again && this.page.firstChild && this.page.dataset.kind === one.kind && this.page.dataset.title === one.title;
    const scrolled = same ? this.page.scrollTop : 0;
    Object.assign(this.page.dataset, { kind: one.kind, title: one.title });
    this.page.setAttribute("aria-labelledby", `${this.id}-${at}`);
    this.page.replaceChildren(h(one.kind === "prose" ? "div" : "pre", { text: one.text }));
    this.page.scrollTop = scrolled;
  }

  key(event) {
    const last = this.shown.length - 1, to = { ArrowLeft: this.at - 1, ArrowRight: this.at + 1, Home: 0, End: last }[event.key];
    if (to === undefined) return;
    this.turn((to + last + 1) % (last + 1));
    this.tabs.children[this.at].focus();
    event.preventDefault();
    event.stopPropagation();
  }
}
