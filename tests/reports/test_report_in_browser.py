"""A report in a real browser: both schemes, a phone, the slider, sorting, switches, hovering; and that nothing leaves the file."""

import re

import pytest

from helpers.browser import Page, browsing, console_errors, requested_hosts
from helpers.report_runs import ATTACK, FOUR_IMAGES, epoch_of, go_on, scores_of, small_gallery, write_run
from unet_trainer.reports.comparison import render_comparison
from unet_trainer.reports.run_report import render_report, write_report
from unet_trainer.runs.record import read_run_summary
from unet_trainer.runs.tables import worst_first

pytestmark = pytest.mark.browser

IDS = ("sky", f"a road {ATTACK}", "cow", "a-class-with-a-very-long-name-that-has-no-place-to-break-on-a-phone")
ARROW_RIGHT, ARROW_LEFT, ESCAPE = "\ue014", "\ue012", "\ue00c"


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    with browsing(tmp_path_factory.mktemp("downloads")) as browser:
        yield browser


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """Four classes with hostile names, four images, a run that was interrupted and went on."""
    place = tmp_path_factory.mktemp("report")
    folder = write_run(place / "run", IDS, end="interrupted", encoder=ATTACK)
    record = go_on(
        folder, 3, model={"ids": list(IDS), "classes": list(IDS), "encoder": ATTACK}, data={"notices": [ATTACK]}
    )
    record.add_epoch(*epoch_of(4, list(IDS), 0.55, {"cow": 0.1}))
    record.end("finished")
    gallery = small_gallery(place / "data", worst_first(scores_of(FOUR_IMAGES)))
    page = place / "report.html"
    page.write_text(render_report(read_run_summary(folder), gallery), encoding="utf-8")
    return page


class ReportPage(Page):
    def choose(self, name, value):
        self.run("arguments[0].click()", self.find(f'[name="{name}"][value="{value}"]'))

    def select(self, selector, value):
        script = "arguments[0].value = arguments[1]; arguments[0].dispatchEvent(new Event('change'))"
        self.run(script, self.find(selector), value)

    def names(self):
        return [card.get_attribute("data-name") for card in self.all("#gallery li") if card.is_displayed()]


@pytest.fixture
def page(driver, report):
    console_errors(driver), requested_hosts(driver)
    page = ReportPage(driver, report.as_uri()).open(1280)
    yield page
    assert console_errors(driver) == []
    assert requested_hosts(driver) <= {"file", "data"}
    assert page.run("return window.hit") is None


@pytest.mark.parametrize(("scheme", "width", "is_phone"), [("light", 1280, False), ("dark", 390, True)])
def test_it_renders_in_both_schemes_and_on_a_phone_without_scrolling_sideways(page, scheme, width, is_phone):
    page.open(width, 844, scheme, is_phone)
    assert page.run("return document.documentElement.scrollWidth") <= width
    background = page.run("return getComputedStyle(document.body).backgroundColor")
    assert (int(background.split("(")[1].split(",")[0]) < 60) == (scheme == "dark")
    assert len(page.all(".chart > svg")) == 6
    assert page.find("#best-iou").text == "0.600"
    assert page.find("#gallery").rect["y"] < page.find('[data-key="iou"]').rect["y"]
    for figure in page.all("figure"):
        box = figure.rect
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= width


def test_a_chart_is_read_by_hovering_and_with_the_keyboard_and_says_it(page):
    from selenium.webdriver import ActionChains

    chart = page.find('[data-key="iou"] > svg')
    page.run("arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", chart)
    ActionChains(page.driver).move_to_element_with_offset(chart, chart.size["width"] // 2 - 20, 0).perform()
    assert page.find('[data-key="iou"] .tip').text.splitlines()[:3] == ["epoch 4", "val 0.55", "train 0.6"]
    page.run("arguments[0].focus()", chart)
    chart.send_keys(ARROW_RIGHT, ARROW_LEFT, ARROW_LEFT)
    spoken = page.run("return document.querySelector('[data-key=\"iou\"] [aria-live]').textContent")
    assert spoken == "epoch 2: val 0.6, train 0.65"
    assert chart.get_attribute("aria-label").startswith("IoU over epoch: val from 0.4 to 0.55; train from 0.45 to 0.6.")


def test_classes_are_switched_off_and_on_and_the_score_is_chosen(page):
    box = '[data-key="classes-curve"]'
    assert len(page.all(f"{box} .line")) == 4
    cow = page.find(f'{box} [data-name="switch cow"]')
    page.run("arguments[0].click()", cow)
    assert len(page.all(f"{box} .line")) == 3
    assert page.find(f'{box} [data-name="switch cow"]').get_attribute("aria-pressed") == "false"
    page.select(f"{box} select", "2")
    assert len(page.all(f"{box} .line")) == 3  # what was switched off stays so
    assert page.find(f"{box} svg").get_attribute("aria-label").startswith("Precision over epoch")
    page.run("arguments[0].click()", page.find(f'{box} [data-name="all"]'))
    assert len(page.all(f"{box} .line")) == 4


def test_a_picture_has_its_own_shape_and_its_slider_which_appears_with_the_focus_moves_the_border(page):
    for selector in ("#gallery .stack", "#gallery .photo", "#gallery .truth"):
        size = page.find(selector).size
        assert size["width"] / size["height"] == pytest.approx(60 / 40, abs=0.01)
    slide = page.find("#gallery .slide")
    assert slide.value_of_css_property("opacity") == "0"
    slide.send_keys(*[ARROW_RIGHT] * 5)
    assert slide.value_of_css_property("opacity") == "1"
    assert page.find("#gallery .truth").value_of_css_property("clip-path") == "inset(0px 45% 0px 0px)"
    assert page.find("#gallery .prediction").value_of_css_property("clip-path") == "inset(0px 0px 0px 55%)"


def test_choices_of_the_gallery_and_of_the_matrix_are_followed_and_hostile_names_are_text(page):
    def visible():
        layers = ("truth", "prediction", "errors")
        styles = {name: page.find(f"#gallery .{name}").value_of_css_property("visibility") for name in layers}
        return [name for name, style in styles.items() if style == "visible"]

    assert visible() == ["truth", "prediction"]
    page.choose("gallery-view", "errors")
    assert visible() == ["errors"]
    page.choose("gallery-view", "image")
    assert visible() == []
    page.choose("gallery-group", "best")
    assert page.names() == ["images/c.png", "images/d.png"]
    page.choose("gallery-group", "all")
    page.select("#gallery-sort", "best")
    assert page.names() == [f"images/{name}.png" for name in "dcba"]
    assert page.find("#matrix .diagonal").text == "80.0 %"
    page.select("#matrix-show", "pixels")
    assert page.find("#matrix .diagonal").text == "8"
    assert ATTACK in page.find("#data").text
    assert ATTACK in page.run("return document.querySelector('[data-key=\"classes-curve\"] .switches').textContent")


def test_a_picture_is_shown_in_full_size_and_the_next_one_follows(page):
    page.run("arguments[0].click()", page.find("#gallery .enlarge"))
    viewer = page.find("#viewer")
    assert viewer.is_displayed()
    assert page.find("#viewer-text").text.startswith("images/a.png: IoU 0.200")
    assert page.find("#viewer-frame .photo").size["width"] > 600  # of 60 pixels
    page.find("#viewer-after").click()
    assert page.find("#viewer-text").text.startswith("images/b.png")
    viewer.send_keys(ESCAPE)
    assert not viewer.is_displayed()
    page.wait_until(lambda: page.run("return document.activeElement.className") == "enlarge")


def test_runs_are_compared_by_epoch_and_by_time(driver, tmp_path):
    folders = write_run(tmp_path / "a"), write_run(tmp_path / "b", ious=(0.7,))
    text = render_comparison([read_run_summary(folder) for folder in folders])
    (tmp_path / "page.html").write_text(text, encoding="utf-8")
    page = ReportPage(driver, (tmp_path / "page.html").as_uri()).open(390, 844, is_phone=True)
    assert page.run("return document.documentElement.scrollWidth") == 390
    assert len(page.all('[data-key="val-iou"] .line')) == 2
    assert len(page.all('[data-key="val-iou"] .c1.point[r="5"]')) == 1  # one epoch has no line
    page.select('[data-key="val-iou"] select', "1")
    assert page.find('[data-key="val-iou"] svg').get_attribute("aria-label").startswith("by time over minutes")
    assert console_errors(driver) == []


def test_the_page_of_a_run_that_goes_on_reloads_itself_and_keeps_its_place_and_what_was_chosen(
    driver, tmp_path, monkeypatch
):
    monkeypatch.setattr("unet_trainer.reports.page.RELOAD_SECONDS", 0.5)
    folder = write_run(tmp_path / "run", end=None)
    page = ReportPage(driver, write_report(folder, with_pictures=False, is_running=True).as_uri()).open(800, 600)
    # Each step is one script: the page may reload itself between two of them.
    page.run("""
        document.querySelector('[data-key="iou"] [data-name="switch train"]').click();
        document.querySelector('[data-key="loss-numbers"]').open = true;
        scrollTo({top: 1500, behavior: 'instant'});
    """)
    record = go_on(folder, 3)
    record.add_epoch(*epoch_of(4, ["background", "foreground"], 0.5))
    record.save()
    write_report(folder, with_pictures=False, is_running=True)
    page.wait_until(lambda: "4/3 epochs done" in page.run("return document.body.textContent"))
    state = """return [
        scrollY,
        document.querySelectorAll('[data-key="iou"] .line').length,
        document.querySelector('[data-key="loss-numbers"]').open,
    ]"""
    assert page.run(state) == [1500, 1, True]
    record.end("finished")
    write_report(folder, with_pictures=False)
    page.wait_until(lambda: page.run("return document.querySelector('.pill').textContent") == "Finished")
    assert page.run(state) == [1500, 1, True]
    assert page.run("return [document.body.dataset.reloadUntil, history.state]") == [None, None]
    assert console_errors(driver) == []


def test_a_page_whose_run_was_killed_stops_to_reload_itself(driver, tmp_path, monkeypatch):
    folder = write_run(tmp_path / "run", end=None)
    monkeypatch.setattr("unet_trainer.reports.page.RELOAD_SECONDS", 0.1)
    write_report(folder, with_pictures=False, is_running=True)
    text = (folder / "report.html").read_text(encoding="utf-8")
    (folder / "old.html").write_text(re.sub('until="[0-9]+"', 'until="1000"', text), encoding="utf-8")
    page = ReportPage(driver, (folder / "old.html").as_uri()).open()
    page.run("window.isFirst = true")
    driver.execute_async_script("setTimeout(arguments[0], 500)")
    assert page.run("return window.isFirst") is True
