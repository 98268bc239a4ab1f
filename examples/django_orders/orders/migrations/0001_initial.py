"""The first table."""

from django.db import migrations, models


class Migration(migrations.Migration):
    """See `Order`."""

    initial = True
    dependencies = ()
    operations = (
        migrations.CreateModel(
            name="Order",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("number", models.CharField(db_index=True, max_length=40)),
                ("status", models.CharField(max_length=40)),
                ("changes", models.PositiveIntegerField(default=0)),
            ],
        ),
    )
