"""The page of `try` in a real browser: what a user does with mouse, keyboard and files, and what the page then shows."""

import numpy as np
import pytest
from PIL import Image

from helpers.brightness_engine import bright_predictor
from helpers.browser import Page, browsing, console_errors, requested_hosts
from helpers.image_bytes import cv2_bytes
from helpers.try_page import serving
from unet_trainer.datasets.pairs import Pair
from unet_trainer.images.image_decoding import write_image

pytestmark = pytest.mark.browser

HEIGHT, WIDTH = 40, 60
GREEN, BLACK = [0, 200, 120], [0, 0, 0]
TAB, SPACE = "\ue004", " "


def picture(level=200, dark=30):
    """Grey, with a bright right half."""
    pixels = np.full((HEIGHT, WIDTH, 3), dark, np.uint8)
    pixels[:, WIDTH // 2 :] = level
    return pixels


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """Two validation images. In the truth of both the object begins 10 columns further to the right than the model finds it."""
    folder = tmp_path_factory.mktemp("pairs")
    mask = np.zeros((HEIGHT, WIDTH), np.uint8)
    mask[:, WIDTH // 2 + 10 :] = 1
    for name, level in (("a", 200), ("b", 240)):
        write_image(folder / f"{name}.png", picture(level))
        write_image(folder / f"{name}_mask.png", mask)
    pairs = [Pair(name, folder / f"{name}.png", folder / f"{name}_mask.png") for name in ("a", "b")]
    with serving(bright_predictor(), pairs) as running:
        yield running


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    with browsing(tmp_path_factory.mktemp("downloads")) as browser:
        yield browser


class TryPage(Page):
    def open(self, *given, **named):
        super().open(*given, **named)
        self.wait_for("status", "a: IoU")
        return self

    def pixel(self, canvas, x, y):
        script = "return Array.from(document.getElementById(arguments[0]).getContext('2d').getImageData(arguments[1], arguments[2], 1, 1).data)"
        return self.run(script, canvas, x, y)[:3]

    def choose(self, view):
        self.find(f"[value={view}]").click()

    def row(self, class_id):
        """Share, IoU and probability at the point of a class."""
        cells = self.all(f"#rows tr:nth-child({class_id + 1}) td")
        return [cell.text for cell in cells]

    def point_at(self, x, y):
        """The mouse over a pixel of the prediction."""
        from selenium.webdriver import ActionChains

        canvas = self.find("#prediction")
        size = canvas.size
        offset = ((x + 0.5) / WIDTH - 0.5) * size["width"], ((y + 0.5) / HEIGHT - 0.5) * size["height"]
        ActionChains(self.driver).move_to_element_with_offset(canvas, *map(round, offset)).perform()

    def press(self, *keys):
        """To whatever has the focus."""
        from selenium.webdriver import ActionChains

        ActionChains(self.driver).send_keys(*keys).perform()

    def focus(self, selector):
        self.run("arguments[0].focus()", self.find(selector))


@pytest.fixture
def page(driver, server):
    """Freshly opened; at the end its console must be empty, and nothing have been asked for elsewhere."""
    requested_hosts(driver), console_errors(driver)
    opened = TryPage(driver, server.url).open()
    yield opened
    assert console_errors(driver) == []
    hosts = requested_hosts(driver)
    assert "127.0.0.1" in hosts
    assert hosts <= {"127.0.0.1", "data", "blob"}


def blend(level, colour, share):
    return pytest.approx([(1 - share) * level + share * each for each in colour], abs=2)


def test_the_first_validation_image_is_there_when_the_page_opens(page):
    assert page.text("run") == "bright"
    assert "validation IoU 0.750" in page.text("model")
    # 20 of the 30 columns that the model finds are in the truth.
    assert page.text("status").startswith("a: IoU of this image 0.667. 60×40 pixels, ")
    assert page.row(0)[:2] == ["50.0 %", ""]
    assert page.row(1)[:2] == ["50.0 %", "0.667"]
    assert page.pixel("prediction", 50, 5) == blend(200, GREEN, 0.45)
    assert page.pixel("prediction", 5, 5) == [30, 30, 30]
    assert page.pixel("prediction", 30, 5) == page.pixel("prediction", 51, 5) == GREEN  # the outline and the hatch
    assert page.pixel("truth", 35, 5) == [200, 200, 200]
    assert page.pixel("truth", 50, 5) == blend(200, GREEN, 0.45)
    assert len(page.all(".thumbnail img")) == 2
    truth, prediction = page.find("#truth").rect, page.find("#prediction").rect
    assert truth["y"] == prediction["y"]
    assert prediction["width"] > 450  # two of them fill what the window leaves
    under = "const box = document.querySelector('.drop').getBoundingClientRect(); return document.elementFromPoint(box.x + 9, box.y + 9).id"
    assert page.run(under) == "file"  # a click anywhere in the zone chooses a file


def test_views_show_image_mask_and_errors(page):
    page.choose("image")
    assert page.pixel("prediction", 50, 5) == [200, 200, 200]
    assert not page.find("#truth").is_displayed()
    assert not page.find("#opacity").is_enabled()
    page.choose("mask")
    assert (page.pixel("prediction", 50, 5), page.pixel("prediction", 5, 5), page.pixel("truth", 35, 5)) == (
        GREEN,
        BLACK,
        BLACK,
    )
    page.choose("errors")
    assert page.pixel("prediction", 35, 5) == blend(200, [255, 130, 0], 0.85)
    assert page.pixel("prediction", 50, 5) == [200, 200, 200]
    assert page.text("legend") == "missed: 0.0 % of the image\nnot in the truth: 16.7 % of the image"


def test_classes_are_switched_on_and_off_with_the_keyboard(page):
    page.focus("#rows tr:nth-child(2) input")
    page.press(SPACE)
    assert page.pixel("prediction", 50, 5) == [200, 200, 200]
    assert page.pixel("truth", 50, 5) == [200, 200, 200]
    page.focus("#rows tr:nth-child(1) input")
    page.press(SPACE)
    assert page.pixel("prediction", 5, 5) == blend(30, BLACK, 0.45)


def test_probabilities_are_those_under_the_mouse(page):
    page.point_at(45, 20)
    # Level 200: logits -20 and -5.5, and 1 / (1 + exp(-14.5)) is 1.
    assert (page.row(0)[2], page.row(1)[2]) == ("0 %", "100 %")
    assert page.text("spot") == "x 45, y 20: foreground 100 %; truth: foreground"
    page.point_at(35, 3)
    assert page.text("spot") == "x 35, y 3: foreground 100 %; truth: background"


def test_a_file_is_uploaded_and_has_no_truth(page, tmp_path):
    # Level 130: the foreground has the probability 0.622, see test_try_server.
    (tmp_path / "mine.png").write_bytes(cv2_bytes(".png", picture(130)))
    page.find("#file").send_keys(str(tmp_path / "mine.png"))
    page.wait_for("status", "mine.png: 60×40 pixels, ")
    assert not page.find("#truth").is_displayed()
    assert not page.find("[value=errors]").is_enabled()
    page.point_at(45, 20)
    assert (page.row(0)[-1], page.row(1)[-1]) == ("12 %", "88 %")
    assert page.all("[name=validation]:checked") == []


@pytest.mark.parametrize(
    "event",
    [
        "new DragEvent('drop', {dataTransfer: data, bubbles: true})",
        "new ClipboardEvent('paste', {clipboardData: data, bubbles: true})",
    ],
)
def test_an_image_is_dropped_or_pasted(page, event):
    script = f"""
        const data = new DataTransfer(), canvas = document.getElementById('prediction'), done = arguments[0];
        canvas.toBlob(blob => {{
            data.items.add(new File([blob], 'dropped.png', {{type: 'image/png'}}));
            document.body.dispatchEvent({event});
            done(true);
        }});
    """
    assert page.driver.execute_async_script(script)
    page.wait_for("status", "dropped.png: 60×40 pixels, ")


def test_an_image_that_the_model_cannot_take_is_refused_in_a_sentence(driver, server, tmp_path):
    page = TryPage(driver, server.url).open()
    deep, large = tmp_path / "deep.png", tmp_path / "large.png"
    deep.write_bytes(cv2_bytes(".png", np.zeros((4, 4, 3), np.uint16)))
    page.find("#file").send_keys(str(deep))
    page.wait_for("error", "deep.png: 16-bit values; the model was trained on 8-bit images")
    assert not page.find("#prediction").is_displayed()
    assert not page.find("#download").is_enabled()
    assert [message.split(" - ")[1][:51] for message in console_errors(driver)] == [
        "Failed to load resource: the server responded with a"[:51]
    ]
    requested_hosts(driver)
    driver.execute_script("facts.max_upload = 10")
    large.write_bytes(bytes(3 * 2**20))
    page.find("#file").send_keys(str(large))
    page.wait_for(
        "error",
        "large.png: 3 MiB; the page takes files of up to 64 MiB, and python train_unet.py predict takes larger ones",
    )
    assert requested_hosts(driver) == set()  # it was not sent
    page.focus("[name=validation]")
    page.press(SPACE)
    page.wait_for("status", "a: IoU")
    assert not page.find("#error").is_displayed()


def test_an_image_that_takes_long_says_so_and_gives_way_to_the_next(driver):
    predictor = bright_predictor()
    predictor.whole, predictor.tile = 3000, (32, 32)
    with serving(predictor) as server:
        page = TryPage(driver, server.url)
        driver.get(server.url)
        page.wait_for("empty", "Choose, drop or paste an image.")
        predictor.engine.is_free.clear()
        upload = """const canvas = document.createElement('canvas'), done = arguments[2];
            [canvas.width, canvas.height] = [arguments[1], 40];
            canvas.toBlob(blob => { showFile(new File([blob], arguments[0])); done(); });"""
        driver.execute_async_script(upload, "slow.png", 600)
        page.wait_for("status", "slow.png: working …")
        server.progress = (3, 8)
        page.wait_for("progress", "37 % done")
        assert page.find("#viewer").get_attribute("aria-busy") == "true"
        driver.execute_async_script(upload, "next.png", 60)
        page.wait_for("status", "next.png: working …")
        predictor.engine.is_free.set()
        page.wait_for("status", "next.png: 60×40 pixels")
        assert page.text("progress") == ""
        assert page.text("prediction-caption") == "Prediction: next.png"
        assert page.find("#viewer").get_attribute("aria-busy") is None
    assert console_errors(driver) == []


def test_the_mask_is_downloaded_as_class_ids_with_colours(page, tmp_path):
    page.driver.execute_cdp_cmd("Browser.setDownloadBehavior", {"behavior": "allow", "downloadPath": str(tmp_path)})
    page.find("#download").click()
    path = tmp_path / "a_mask.png"
    page.wait_until(path.is_file)
    with Image.open(path) as mask:
        assert mask.mode == "P"
        assert np.array_equal(np.asarray(mask), picture()[:, :, 0] > 127)
        assert mask.convert("RGB").getpixel((50, 5)) == tuple(GREEN)


def test_every_control_is_reached_with_tab_and_shows_that_it_is(page):
    page.run("document.activeElement.blur()")
    reached = {}
    for _ in range(40):
        page.press(TAB)
        element = page.driver.switch_to.active_element
        name = element.get_attribute("id") or element.get_attribute("name") or element.tag_name
        if name in reached:
            break
        script = """const shown = arguments[0].matches('.thumbnail input, .choice input, .drop input') ? arguments[0].nextElementSibling : arguments[0];
            return getComputedStyle(shown).outlineStyle"""
        reached[name] = page.run(script, element)
    assert list(reached)[:10] == [
        "summary",
        "file",
        "validation",
        "view",
        "opacity",
        "fit",
        "one",
        "out",
        "in",
        "prediction",
    ]
    assert list(reached)[10:13] == ["class-0", "class-1", "download"]
    assert [name for name, outline in reached.items() if outline != "solid" and name != "body"] == []


def test_on_a_phone_nothing_is_wider_than_the_screen(page):
    page.open(390, 844, is_phone=True)
    assert page.run("return document.documentElement.scrollWidth") == 390
    for name in ("#file", "#opacity", "#prediction", "#truth", "#download", "table"):
        box = page.find(name).rect
        assert box["x"] >= 0, name
        assert box["x"] + box["width"] <= 390, name
    assert page.find("#truth").rect["y"] > page.find("#prediction").rect["y"]  # below each other
    assert page.find("#prediction").size["width"] > 300


def test_a_page_whose_server_has_gone_says_so(driver, server):
    page = TryPage(driver, server.url).open()
    driver.execute_cdp_cmd("Network.enable", {})
    driver.execute_cdp_cmd("Network.setBlockedURLs", {"urls": ["*/predict"]})
    driver.execute_script("showFile(new File(['x'], 'late.png'))")
    page.wait_for("error", "late.png: the server does not answer; is the command still running?")
    driver.execute_cdp_cmd("Network.setBlockedURLs", {"urls": []})
    console_errors(driver)
