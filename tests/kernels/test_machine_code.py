"""The reader of machine code finds the fault that it is there for, and no other."""

from __future__ import annotations

import pytest
from support.machine_code import overwritten_inputs, parse

# A loop like that of the context attention: a product is waited for behind the next one. R120 to
# R127 are what two products read.
LOOP = """
.L_x_5:
        /*0010*/                   LDS.128 R88, [R157+0x18000] ;
        /*0020*/                   HGMMA.64x64x16.F32.BF16 R88, gdesc[UR4], RZ, !UPT, gsb0 ;
        /*0030*/                   {between}
        /*0040*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*0050*/                   F2FP.BF16.F32.PACK_AB R120, R89, R88 ;
        /*0060*/                   WARPGROUP.ARRIVE ;
        /*0070*/                   HGMMA.64x128x16.F32.BF16 R24, R120, gdesc[UR4].tnspB, R24 ;
        /*0080*/                   HGMMA.64x128x16.F32.BF16 R24, R124, gdesc[UR4], R24, gsb0 ;
        /*0090*/                   {behind}
        /*00a0*/              @!P0 BRA `(.L_x_5) ;
        /*00b0*/                   {beyond}
        /*00c0*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*00d0*/                   MOV R120, R1 ;
        /*00e0*/                   EXIT ;
"""
HARMLESS = "FADD R119, R120, R121 ;"


def faults(**instructions: str) -> list[str]:
    places = dict.fromkeys(("between", "behind", "beyond"), HARMLESS)
    num_products, found = overwritten_inputs(parse(LOOP.format(**places | instructions)))
    assert num_products == 2
    return found


@pytest.mark.parametrize(
    "harmless",
    [
        HARMLESS,
        "ST.E.128 desc[UR16][R120.64], R124 ;",
        "LDGSTS.E.BYPASS.128 [R120], desc[UR16][R94.64], !P3 ;",
        "LDS.128 R116, [R120] ;",
        "ISETP.GE.AND P3, PT, R121, R153, PT ;",
        "SHFL.BFLY PT, R119, R120, 0x1, 0x1f ;",
        "FCHK P1, R120, R121 ;",
        "IMAD.WIDE.U32 R118, R120, UR10, R14 ;",
    ],
)
def test_reading_them_or_writing_others_is_no_fault(harmless: str) -> None:
    assert faults(behind=harmless, between=harmless, beyond=harmless) == []


@pytest.mark.parametrize(
    ("writer", "product"),
    [
        ("MOV R121, RZ ;", "R120"),
        ("@P2 FADD R120, R1, R2 ;", "R120"),
        ("LDS.128 R117, [R157] ;", "R120"),
        ("LDG.E.64 R123, desc[UR16][R94.64] ;", "R120"),
        ("IMAD.WIDE.U32 R127, R97, UR10, R14 ;", "R124"),
        ("LDSM.16.M88.4 R124, [R3] ;", "R124"),
        ("SHFL.BFLY PT, R126, R121, 0x2, 0x1f ;", "R124"),
        ("LOP3.LUT P1, R122, R3, 0x1, RZ, 0xc0, !PT ;", "R120"),
        ("HGMMA.64x64x16.F32.BF16 R96, gdesc[UR4], RZ, !UPT ;", "R120"),
    ],
)
@pytest.mark.parametrize("place", ["between", "behind", "beyond"])
def test_writing_them_before_the_wait_is_a_fault(place: str, writer: str, product: str) -> None:
    """Right behind, over the border of the loop, and on the way out of it."""
    found = faults(**{place: writer})
    assert any(f" {product}, gdesc" in each and writer[:-2] in each for each in found)
